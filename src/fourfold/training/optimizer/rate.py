"""The learning rate: a pure function of the optimizer step. Nothing is stepped, so nothing can be stepped twice."""

from __future__ import annotations

import math

from fourfold.training.optimizer.options import OptimizerOptions


def learning_rate(options: OptimizerOptions, step: int) -> float:
    """The rate of optimizer step `step`, counted from 0, whatever the world size or the accumulation.

    Warm-up: lr (step + 1) / warmup, so that the first step moves and step `warmup - 1` runs at `lr`. After it the rate
    falls to `final` times lr at the last step, `steps - 1`, and stays there.
    """
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    if options.decay == "constant":
        return options.lr
    gone = min(1.0, (step + 1 - options.warmup) / max(1, options.steps - options.warmup))
    left = 1 - gone if options.decay == "linear" else (1 + math.cos(math.pi * gone)) / 2
    return options.lr * (options.final + (1 - options.final) * left)
