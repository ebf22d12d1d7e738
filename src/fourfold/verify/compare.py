"""`fourfold verify`: k steps of a config's plan beside one plain process."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import nn

from fourfold.anatomy import materialize
from fourfold.config import Config, Loaded
from fourfold.plan import Plan
from fourfold.training import subject
from fourfold.training.choice import choose
from fourfold.training.data import prepare
from fourfold.training.values import fill_buffers
from fourfold.verify.case import Case, Weights
from fourfold.verify.ranks import on_processes, on_threads
from fourfold.verify.verdict import Verdict


def verify(loaded: Loaded, steps: int = 3, backend: str = "threads") -> Verdict:
    """Run the plan and the reference, and compare.

    A plan that computes in fp32 is run in fp64, where rounding cannot hide an error; one in bf16 is run as it is.

    Args:
        loaded: the configuration; its plan may be auto.
        steps: optimizer steps.
        backend: "threads" (ranks in this process) or "gloo" (real processes).

    Raises:
        ValueError: less than one step, another backend, or a configuration that cannot be run.
        RanksFailed: a rank did not finish.
    """
    if steps < 1:
        raise ValueError(f"steps: expected at least 1, found {steps}")
    if backend not in ("threads", "gloo"):
        raise ValueError(f"backend: expected threads or gloo, found {backend!r}")
    case = case_of(loaded.config, widened(choose(loaded.config).plan), steps)
    evidence = on_threads(case) if backend == "threads" else on_processes(loaded, case)
    return Verdict.of(case.plan, evidence, backend)


def widened(plan: Plan) -> Plan:
    """The same plan, in fp64 where it says fp32."""
    if plan.placement.precision != "fp32":
        return plan
    return dataclasses.replace(plan, placement=dataclasses.replace(plan.placement, precision="fp64"))


def case_of(config: Config, plan: Plan, steps: int) -> Case:
    """What a configuration trains, as a case: the same data, weights and seed on both sides."""
    data = prepare(
        config.data, rows=config.train.batch, seed=config.seed, tokenizer_file=subject.tokenizer_file(config)
    )

    return Case(
        model=partial(parallel_model, config),
        plain=partial(plain_model, config),
        loss=subject.loss(config),
        options=subject.options(config),
        plan=plan,
        batch=data.source.batch,
        seed=config.seed,
        steps=steps,
    )


def parallel_model(config: Config) -> tuple[nn.Module, Weights]:
    """The model as `fourfold train` makes it: without values, and where they come from."""
    model, weights = subject.deferred_model(config)
    fill_buffers(model, config.seed)
    return model, weights


def plain_model(config: Config) -> nn.Module:
    """The same model, whole, on the CPU: every initialiser run at the seed, then what a folder's files hold."""
    deferred, weights = subject.deferred_model(config)
    model = materialize(deferred, config.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights(name, 0, parameter.numel(), parameter.dtype).view_as(parameter))
    return model
