"""What a resumed run asks for that the run did not: refused where it is another run, told where numbers change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fourfold.config import Config
from fourfold.plan import Plan, PlanError

FIXED = ("seed", "model", "data", "loss", "optimizer.name", "train.batch")
"""Settings that a resumed run keeps: with others the weights, the optimizer's state or the place in the data would mean
something else than what the checkpoint holds."""
HARMLESS = ("data.cache", "train.evaluate_every", "train.evaluate_batches", "train.sample", "run", "launch", "hardware")
"""Settings that change no number of training. (`train.steps` is none of them: learning rates decay towards it.)"""
ROUNDING = ("plan.placement.precision", "plan.wire", "plan.sync")
"""Of a plan: what changes numbers by more than the order of sums."""

Change = tuple[object, object]


def refused(before: Config, now: Config) -> dict[str, Change]:
    """Settings that must stay as they were and did not, by dotted key: (before, now)."""
    found = {key: change for key, change in _changes(before, now) if _among(key, FIXED)}
    old, new = _precision(before), _precision(now)
    if (old == "fp64") != (new == "fp64"):
        found["plan.placement.precision"] = (old, new)
    return found


def told(before: Config, now: Config) -> list[str]:
    """One line for each setting that may change and changes numbers from here on."""
    return [
        f"resumed with another {key}: {new}, was {old}; from here on the numbers are those of the new one"
        for key, (old, new) in _changes(before, now)
        if not _among(key, FIXED) and not _of_the_plan(key)
    ]


def plans(before: Config, now: Config) -> str:
    """`new plan, was old plan`, where they place or order the same work differently; else empty."""
    changed = {key: change for key, change in _changes(before, now) if _of_the_plan(key)}
    new, old = _plan(now), _plan(before)
    if changed and new == old:  # what a plan's words leave out, such as the size of its messages
        return "; ".join(f"{key.removeprefix('plan.')} {now}, was {before}" for key, (before, now) in changed.items())
    return f"{new}, was {old}" if changed else ""


def replanned(before: Config, now: Config) -> bool:
    """The plan has changed in whatever way: what was measured under the old one does not tell of the new one."""
    return any(_among(key, ("plan",)) for key, _ in _changes(before, now))


def _of_the_plan(key: str) -> bool:
    """Of the plan, and no number of training depends on it but by the order of sums."""
    return _among(key, ("plan",)) and not _among(key, ROUNDING)


def _plan(config: Config) -> str:
    try:
        return str(Plan.of(config.plan if isinstance(config.plan, dict) else None))
    except PlanError:  # another version wrote it
        return "one that this version does not know"


def _changes(before: Config, now: Config) -> Iterator[tuple[str, Change]]:
    old, new = dict(_leaves(before.to_dict())), dict(_leaves(now.to_dict()))
    for key in {**old, **new}:
        if old.get(key) != new.get(key) and not _among(key, HARMLESS):
            yield key, (old.get(key), new.get(key))


def _precision(config: Config) -> str:
    """Of the plan. Master weights rest in fp64 under fp64 alone, which the planner never chooses."""
    plan = config.plan if isinstance(config.plan, Mapping) else {}
    return plan.get("placement", {}).get("precision", "fp32")


def _leaves(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield above + key, value


def _among(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
