"""What `model.config` may say: the settings that transformers reads. It keeps all others, too, and says nothing."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from transformers import GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fourfold.config.problem import nearest
from fourfold.training.safetensors_source import LoaderError

DTYPES = ("dtype", "torch_dtype")
"""Of a file's weights. A model is built in float32 and computes as the plan says."""


def check(raw: Mapping[str, Any], where: str = "model.config") -> None:
    """Refuse settings that would have no effect, which are most often misspelled.

    Args:
        raw: what a person wrote, `model_type` included (transformers refuses one that it does not know).
        where: the setting's key.

    Raises:
        LoaderError: names each such setting, and the nearest one that has an effect.
    """
    for name in DTYPES:
        if raw.get(name) is not None:
            raise LoaderError(
                f"{where}.{name}: expected none, found {raw[name]!r}: weights rest in fp32, and the precision of "
                "compute is plan.placement.precision (fp32, bf16 or fp64); set that, and remove this line"
            )
    kind = raw["model_type"]
    if kind in CONFIG_MAPPING:
        unknown = list(_unknown(raw, CONFIG_MAPPING[kind]))
        if unknown:
            more = "".join(f"; nor of {name!r}{hint}" for name, hint in unknown[1:])
            name, hint = unknown[0]
            raise LoaderError(
                f"{where}.{name}: transformers' {kind} knows nothing of this setting{hint}{more}; correct or remove it"
            )


def check_heads(settings: Any, where: str) -> None:
    """Refuse query heads that cannot share the key-value heads evenly: transformers builds the model, and fails in it.

    Raises:
        LoaderError: names both settings, and the nearest numbers that fit.
    """
    heads, shared = (getattr(settings, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        fits = [count for count in range(1, heads + 1) if heads % count == 0]
        near = sorted(sorted(fits, key=lambda count: abs(count - shared))[:2])
        raise LoaderError(
            f"{where}: expected num_attention_heads ({heads}) to be a multiple of num_key_value_heads, found {shared}; "
            f"try num_key_value_heads: {' or '.join(map(str, near))}"
        )


def _unknown(raw: Mapping[str, Any], kind: type[PretrainedConfig]) -> Iterator[tuple[str, str]]:
    """(name, hint) of what nothing in transformers reads."""
    own = (*(field.name for field in dataclasses.fields(kind)), *kind.attribute_map)  # pyright: ignore[reportArgumentType]
    known = {*own, "model_type", *GenerationConfig().to_dict()}
    for name in raw:
        if name not in known and not name.startswith("_") and not _mentioned(name, kind):
            yield name, nearest(name, own)


def _mentioned(name: str, kind: type[PretrainedConfig]) -> bool:
    """Code of the configuration takes it by name, as it does with what older versions wrote (`rope_scaling`)."""
    word = re.escape(name)
    taken = re.compile(rf"[\"']{word}[\"']|\.{word}\b|\b{word} ?[:=]")  # kwargs.pop("name"), self.name, name=None
    return any(taken.search(_code(base)) for base in kind.__mro__[:-1])


@cache
def _code(kind: type) -> str:
    """The file in which a class of transformers is written."""
    module = sys.modules[kind.__module__]
    return inspect.getsource(module) if module.__name__.startswith("transformers.") else ""
