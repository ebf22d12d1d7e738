"""What an optimizer is told: one frozen value, comparable and writable."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


class OptimizerError(ValueError):
    """An optimizer's option that cannot be: names it, with what was expected and found."""


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer, its learning rate over the steps, and clipping.

    Attributes:
        name: "adamw" or "sgd".
        lr: peak learning rate.
        betas, eps: of AdamW.
        weight_decay: of matrices and embeddings (group "decay"); vectors are never decayed.
        momentum: of SGD.
        clip: largest norm of the whole gradient; None: no clipping.
        clip_norm: which norm that is: 2 or infinity.
        warmup: steps over which the rate rises linearly to `lr`.
        decay: how it falls afterwards, until step `steps`.
        final: rate at the last step, as a share of `lr`.
        steps: optimizer steps of the whole run; read by a decay that is not constant.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.0
    clip: float | None = None
    clip_norm: float = 2.0
    warmup: int = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    final: float = 0.1
    steps: int = 1

    def __post_init__(self) -> None:
        _one_of("name", self.name, ("adamw", "sgd"))
        _one_of("decay", self.decay, ("constant", "linear", "cosine"))
        _one_of("clip_norm", self.clip_norm, (2.0, math.inf))
        _at_least("lr", self.lr, 0)
        _at_least("weight_decay", self.weight_decay, 0)
        _at_least("warmup", self.warmup, 0)
        _at_least("steps", self.steps, 1)
        if self.clip is not None:
            _at_least("clip", self.clip, 0)
            if not self.clip:
                raise OptimizerError(f"optimizer.clip: expected more than 0, found {self.clip!r}; None does not clip")


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise OptimizerError(f"optimizer.{name}: expected one of {', '.join(map(str, allowed))}, found {value!r}")


def _at_least(name: str, value: float, least: float) -> None:
    if not (isinstance(value, int | float) and math.isfinite(value) and value >= least):
        raise OptimizerError(f"optimizer.{name}: expected a finite number of at least {least}, found {value!r}")
