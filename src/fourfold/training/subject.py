"""From a configuration to what is trained: how the model is built, its loss, and what a batch looks like."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.anatomy import deferred
from fourfold.config import Config
from fourfold.config.schema import Corpus, Gpt, HfCausalLm, Sgd
from fourfold.models import gpt
from fourfold.placement.arena import Fill
from fourfold.planner.subject import Subject
from fourfold.training.losses import Goldfish, cross_entropy
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.step import Loss
from fourfold.training.values import Drawn

LOSSES: dict[str, Callable[..., Loss]] = {"cross_entropy": lambda: cross_entropy, "goldfish": Goldfish}
"""What `loss.name` may say: each makes the loss from its section's other settings."""


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
    from fourfold.training import loader  # transformers takes seconds to import

    settings = loader.settings_of(_hf_source(config.model))
    if isinstance(config.data, Corpus) and tokenizer_file(config) is None:
        _vocabulary_fits(settings.vocab_size, config.data.vocabulary)
    return loader.builder(settings, config.model.attention)


def deferred_model(config: Config) -> tuple[nn.Module, Fill]:
    """The model without values, and where they come from: a folder's files, or recorded initialisers at the seed."""
    if isinstance(config.model, HfCausalLm):
        from fourfold.training import loader

        builder(config)  # its checks
        loaded = loader.hf_causal_lm(_hf_source(config.model), attention=config.model.attention)
        if loaded.weights is not None:
            return loaded.model, loaded.weights
        return loaded.model, Drawn(loaded.model, config.seed)
    model = deferred(builder(config))
    return model, Drawn(model, config.seed)


def _hf_source(model: HfCausalLm) -> str | dict[str, Any]:
    return model.path if model.path is not None else dict(model.config or {})


def _vocabulary_fits(model: int, data: int) -> None:
    if model < data:
        raise SubjectError(
            f"data.vocabulary: expected at most the model's {model} tokens, found {data}; set data.vocabulary={model}"
        )


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


def loss(config: Config) -> Loss:
    """What is minimised: `loss(model, batch) -> (sum, count)`."""
    return LOSSES[config.loss.name](**config.loss.model_dump(exclude={"name"}))


def example(config: Config, rows: int = 1) -> dict[str, Tensor]:
    """A batch like those to come, with tokens that differ: what a model does is tried on it."""
    width = config.data.sequence + 1
    return {"tokens": (torch.arange(rows * width) % config.data.vocabulary).view(rows, width)}


def subject(config: Config) -> Subject:
    """What the planner needs to know."""
    momentum = isinstance(config.optimizer, Sgd) and config.optimizer.momentum > 0
    return Subject(
        build=builder(config),
        loss=loss(config),
        batch=example(config, rows=2),
        rows=config.train.batch,
        optimizer="sgd-momentum" if momentum else config.optimizer.name,
        tokens_per_row=config.data.sequence,
        name=config.model.name,
    )
