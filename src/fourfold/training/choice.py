"""Which plan is run: the configuration's own, or the planner's choice with its reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import psutil
import torch

from fourfold.config import Config
from fourfold.hardware import Cluster
from fourfold.ledger import Ledger
from fourfold.plan import Plan
from fourfold.planner import Forecast, ForecastError, RefusedError, TraceError, UnrunnableError, here, loaded, silent
from fourfold.planner import plan as forecasts
from fourfold.training.subject import subject

AUTO_WORKERS = 2
"""Most worker processes that `plan: auto` starts on CPUs, unless launch.workers says otherwise."""


class ChoiceError(ValueError):
    """A plan that does not go with the launch: says which settings, and what to try."""


@dataclass(frozen=True)
class Choice:
    """A plan, in a few lines why, and what it was forecast to cost (None: nobody could forecast it)."""

    plan: Plan
    why: tuple[str, ...]
    forecast: Ledger | None = None


def choose(config: Config, workers: int | None = None, tell: Callable[[str], None] = silent) -> Choice:
    """The plan of a run.

    Args:
        config: `plan` and `launch.workers` decide.
        workers: how many there are already (torchrun started them); None: as many as are wanted.
        tell: is told which plan is being forecast.

    Raises:
        ChoiceError: the plan needs another number of workers than there are, or no plan fits.
        PlanError: the plan itself cannot be.
        RefusedError: the plan cannot be laid on this model and batch.
    """
    busy = loaded() if config.hardware == "here" else ()  # before forecasts make it so
    plan = given(config, workers)
    if plan is not None:
        found = _given(config, plan)
    else:
        found = _planned(config, workers or config.launch.workers or default_workers(), tell)
    return replace(found, why=(*busy, *found.why, *crowded(found.plan.world, config.launch.threads)))


def given(config: Config, workers: int | None = None) -> Plan | None:
    """The plan that the configuration names; None where the planner is to choose.

    Raises:
        ChoiceError: the plan needs another number of workers than there are.
        PlanError: the plan itself cannot be.
    """
    if not isinstance(config.plan, dict):
        return None
    plan, wanted = Plan.of(config.plan), workers or config.launch.workers
    if wanted is not None and plan.world != wanted:
        raise ChoiceError(
            f"launch.workers: the plan ({plan}) needs {plan.world}, found {wanted}; "
            f"set launch.workers={plan.world}, or {plan.placement.fitting(wanted)}"
        )
    return plan


def default_workers() -> int:
    """One worker a GPU; without GPUs one a physical core, at most AUTO_WORKERS."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return min(AUTO_WORKERS, cores())


def cores() -> int:
    """Physical cores of this machine."""
    return psutil.cpu_count(logical=False) or 1


def crowded(workers: int, threads: int) -> tuple[str, ...]:
    """A line where workers of `threads` threads each have to share cores of this machine; nothing where they need not.

    Their forecast knows that each has a part of a core, and not how long it waits for the others' turns.
    """
    if torch.cuda.is_available() or workers * threads <= cores():
        return ()
    many = f"{workers} worker{'s'[: workers > 1]}" + (f" of {threads} threads" if threads > 1 else "")
    remedy = f"set launch.threads={max(1, cores() // workers)}"
    if threads == 1:
        remedy = f"a step takes longer than with {cores()} worker{'s'[: cores() > 1]}"
    return (f"{many} on {cores()} core{'s'[: cores() > 1]}: they take turns, and wait for one another; {remedy}",)


def _given(config: Config, plan: Plan) -> Choice:
    """A plan that was asked for, with its forecast; one that does not fit is run all the same, and that is said.

    Raises:
        RefusedError: the model or the batch cannot be cut so: its ranks would only find the same.
        UnrunnableError: the model does not run: neither would its ranks.
    """
    try:
        forecast = forecasts(subject(config), _cluster(config, plan.world), plan).forecasts[0]
    except (RefusedError, UnrunnableError):
        raise
    except (TraceError, ForecastError) as error:
        return Choice(plan, (f"plan: {plan} (given)", f"no forecast: {error}"))
    bound = (f"forecast: this plan does not fit: {forecast.bound}",) if forecast.bound else ()
    return Choice(plan, (f"plan: {plan} (given)", _figures(forecast), *bound), _noted(forecast))


def _planned(config: Config, workers: int, tell: Callable[[str], None]) -> Choice:
    """Ask the planner for the fastest plan that fits."""
    outlook = forecasts(subject(config), _cluster(config, workers), world=workers, tell=tell)
    many = f"{workers} worker{'s'[: workers > 1]}"
    fitting = [one for one in outlook.forecasts if one.fits]
    if not fitting:
        nearest = outlook.forecasts[0]
        raise ChoiceError(
            f"plan: auto: no plan for {many} fits here; the nearest, {nearest.plan}, is bound by "
            f"{nearest.bound}; take a smaller model or train.batch, or more launch.workers"
        )
    best = fitting[0]
    reason = f"the fastest of {len(fitting)} that fit, of {len(outlook.forecasts)} looked at for {many}"
    return Choice(best.plan, (f"plan: {best.plan} (chosen: {reason})", _figures(best)), _noted(best))


def _cluster(config: Config, workers: int) -> Cluster:
    return here(workers) if config.hardware == "here" else Cluster.parse(config.hardware)


def _noted(forecast: Forecast) -> Ledger:
    """The forecast's ledger, with the ends of its interval of seconds: a report tells whether a run fell into it."""
    ends = {"step seconds at best": forecast.low, "step seconds at worst": forecast.high}
    return replace(forecast.ledger, notes=forecast.ledger.notes | ends)


def _figures(forecast: Forecast) -> str:
    rate = forecast.ledger.notes["tokens"] / forecast.timing.total
    return (
        f"forecast: {forecast.timing.total:.3g} s a step ({forecast.low:.3g} to {forecast.high:.3g}), "
        f"{rate:,.0f} tokens/s, {forecast.peak / 2**20:,.0f} MiB a worker, "
        f"{forecast.ledger.sent() / 2**20:,.1f} MiB sent a step and worker"
    )
