"""From a configuration to what is trained: how the model is built, its loss, and what a batch looks like."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.anatomy import initialiser
from fourfold.config import Config
from fourfold.config.schema import Corpus, Gpt, HfCausalLm, Sgd
from fourfold.models import gpt
from fourfold.planner.subject import Subject
from fourfold.training.losses import cross_entropy
from fourfold.training.optimizer import OptimizerOptions

LOSSES = {"cross_entropy": cross_entropy}
"""What `loss.name` may say."""


class SubjectError(ValueError):
    """A model that cannot be built or does not fit the data: names the setting, expected, found, and what to try."""


def builder(config: Config) -> Callable[[], nn.Module]:
    """A function that builds the model; under the meta device it allocates nothing.

    Raises:
        SubjectError: the model's own configuration cannot be read, or its vocabulary is too small for the data.
    """
    if isinstance(config.model, Gpt):
        model = config.model
        shape = gpt.Config(
            vocabulary=config.data.vocabulary,
            context=model.context,
            layers=model.layers,
            width=model.width,
            heads=model.heads,
            dropout=model.dropout,
            tied=model.tie_embeddings,
        )
        return partial(gpt.GPT, shape)
    settings = hf_settings(config.model)
    vocabulary = settings.vocab_size
    own = tokenizer_file(config) is not None
    if isinstance(config.data, Corpus) and not own and vocabulary < config.data.vocabulary:
        raise SubjectError(
            f"data.vocabulary: expected at most the model's {vocabulary} tokens, found {config.data.vocabulary}; "
            f"set data.vocabulary={vocabulary}"
        )
    return partial(build_hf, settings, config.model.attention)


def hf_settings(model: HfCausalLm) -> Any:
    """The transformers configuration of a model, from its folder or from the mapping.

    Raises:
        SubjectError: no such folder, no such architecture, settings that it refuses.
    """
    from transformers import AutoConfig

    if model.path is None:
        settings, where = dict(model.config or {}), "model.config"
    else:
        where = f"{model.path}/config.json"
        try:
            settings = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SubjectError(f"model.path: cannot read {where}: {error}; is it a folder of transformers?") from error
    try:
        return AutoConfig.for_model(**settings)
    except Exception as error:  # transformers raises many types for a configuration that it does not like
        raise SubjectError(f"{where}: transformers refuses it: {error}") from error


def build_hf(settings: Any, attention: str) -> nn.Module:
    """A causal language model of transformers with random weights, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(settings, attn_implementation=attention, dtype=torch.float32)


def tokenizer_file(config: Config) -> Path | None:
    """The tokenizer that a trained model brings along; None where one is trained on the text."""
    if isinstance(config.model, HfCausalLm) and config.model.path is not None:
        path = Path(config.model.path) / "tokenizer.json"
        return path if path.is_file() else None
    return None


def options(config: Config) -> OptimizerOptions:
    """The optimizer's options, with the run's length."""
    chosen = config.optimizer
    options = OptimizerOptions(
        name=chosen.name,
        lr=chosen.lr,
        weight_decay=chosen.weight_decay,
        clip=chosen.clip,
        clip_norm=math.inf if chosen.clip_norm == "inf" else 2.0,
        warmup=chosen.warmup,
        decay=chosen.decay,
        final=chosen.final,
        steps=config.train.steps,
    )
    if isinstance(chosen, Sgd):
        return replace(options, momentum=chosen.momentum)
    return replace(options, betas=chosen.betas, eps=chosen.eps)


def example(config: Config, rows: int = 1) -> dict[str, Tensor]:
    """A batch like those to come: shapes and types, no values that matter."""
    return {"tokens": torch.zeros(rows, config.data.sequence + 1, dtype=torch.int64)}


def subject(config: Config) -> Subject:
    """What the planner needs to know."""
    momentum = isinstance(config.optimizer, Sgd) and config.optimizer.momentum > 0
    return Subject(
        build=builder(config),
        loss=LOSSES[config.loss.name],
        batch=example(config, rows=2),
        rows=config.train.batch,
        optimizer="sgd-momentum" if momentum else config.optimizer.name,
        tokens_per_row=config.data.sequence,
        name=config.model.name,
    )


@dataclass(frozen=True)
class Weights:
    """Where the values of a deferred model come from: its recorded initialisers, at this seed."""

    model: nn.Module
    seed: int

    def __call__(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Flat elements [start, stop) of the logical weight `name`."""
        return initialiser(self.model, name).values(self.seed, start, stop, dtype)


@torch.no_grad()
def fill_buffers(model: nn.Module, seed: int) -> None:
    """Give a deferred model's buffers their values: they are small, and no initialiser of a weight needs them."""
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            values = initialiser(model, name).values(seed, 0, buffer.numel(), buffer.dtype).view(buffer.shape)
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner)._buffers[attribute] = values
