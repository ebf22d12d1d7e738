"""Any causal language model of Hugging Face transformers: from a local folder, or from a configuration alone.

Nothing is downloaded, no code from a folder is run, no pickle is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from fourfold.anatomy import deferred
from fourfold.training import hf_settings
from fourfold.training.axonn_files import AxonnSource, is_set
from fourfold.training.safetensors_source import LoaderError, SafetensorsSource, has_weights


class Weights(Protocol):
    """Where the initial values of a model come from. Any rank may ask for any part; all get the same answer."""

    def __call__(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Flat elements [start, stop) of the logical tensor `name`, row-major, in `dtype`, on the host."""
        ...

    def box(self, name: str, offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The box [sizes] of the logical tensor `name`, in `dtype`, on the host."""
        ...


@dataclass(frozen=True)
class Loaded:
    """A model that has no values yet, and where they come from.

    Attributes:
        model: on meta, with its initialisers recorded; nothing is allocated.
        weights: the values in the folder's files; None: none there, they are drawn by the recorded initialisers.
        settings: the configuration, as transformers holds it.
        tokenizer: of the folder, if it has a tokenizer.json.
    """

    model: nn.Module
    weights: Weights | None
    settings: Any
    tokenizer: Tokenizer | None


def hf_causal_lm(path_or_config: str | Path | Mapping[str, Any], *, attention: str = "sdpa") -> Loaded:
    """A causal language model, deferred.

    Args:
        path_or_config: a local folder with config.json and maybe `*.safetensors` (or per-rank folders in AxoNN's
            layout) and tokenizer.json; or what config.json would hold (`model_type` included), for random weights.
        attention: transformers' attention code, "sdpa" or "eager".

    Raises:
        LoaderError: says what is wrong with the folder, the configuration or the weights, and what to try.
    """
    settings = settings_of(path_or_config)
    model = deferred(builder(settings, attention))
    if isinstance(path_or_config, Mapping):
        return Loaded(model, None, settings, None)
    folder = Path(path_or_config)
    return Loaded(model, _weights(folder, model), settings, tokenizer_of(folder))


def _weights(folder: Path, model: nn.Module) -> Weights | None:
    if not is_set(folder):
        return SafetensorsSource(folder, model) if has_weights(folder) else None
    if any(folder.glob("*.safetensors")):
        raise LoaderError(f"{folder}: expected *.safetensors or folders tp_row_…, found both; move one of them away")
    return AxonnSource(folder, model)


def settings_of(path_or_config: str | Path | Mapping[str, Any]) -> Any:
    """The configuration of transformers in a folder or a mapping.

    Raises:
        LoaderError: no folder, no config.json, an architecture that transformers does not know, quantized weights, or
            (of a mapping) a setting that has no effect.
    """
    if isinstance(path_or_config, Mapping):
        raw, where = dict(path_or_config), "model.config"
    else:
        file = Path(path_or_config) / "config.json"
        where = str(file)
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LoaderError(
                f"{where}: cannot be read ({error}); name a local folder of a transformers model"
            ) from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise LoaderError(
            f"{where}: expected a mapping with model_type, found none; say for instance model_type: llama"
        )
    if raw.get("quantization_config"):
        raise LoaderError(f"{where}: the weights are quantized, which cannot be trained; name the full-precision model")
    if isinstance(path_or_config, Mapping):
        hf_settings.check(raw)
    try:
        settings = AutoConfig.for_model(**raw)
    except Exception as error:  # transformers raises many types for a configuration that it does not like
        raise LoaderError(f"{where}: transformers refuses it: {error}") from error
    hf_settings.check_heads(settings, where)
    return settings


def builder(settings: Any, attention: str = "sdpa") -> Callable[[], nn.Module]:
    """A function that builds the model in float32 (whatever dtype its files have), from transformers' own code."""
    build = partial(AutoModelForCausalLM.from_config, attn_implementation=attention, dtype=torch.float32)
    return partial(build, settings, trust_remote_code=False)


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer, if it has one in the format of the tokenizers library.

    Raises:
        LoaderError: tokenizer.json is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise LoaderError(f"{path}: not a tokenizer ({error}); copy it again") from error
