"""`fourfold plan`: the config's model and machine, as the planner wants to be asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from fourfold.config import Config
from fourfold.hardware import Cluster
from fourfold.plan import Plan
from fourfold.planner import Outlook, Traces, here, loaded, plan
from fourfold.planner.explain import rendered
from fourfold.planner.schedules import Schedules, schedules
from fourfold.training.choice import crowded, default_workers
from fourfold.training.progress import busy
from fourfold.training.subject import subject


@dataclass(frozen=True)
class Planned:
    """The planner's answer, as a command shows it."""

    outlook: Outlook

    @property
    def ok(self) -> bool:
        """Some plan fits."""
        return self.outlook.ok

    def to_dict(self) -> dict[str, Any]:
        """Whether some plan fits, and all that was forecast."""
        return {"ok": self.ok} | self.outlook.to_dict()

    def text(self) -> str:
        """The planner's tables."""
        return self.outlook.text()


def outlook(config: Config, console: Console | None = None) -> Planned:
    """The forecast of the config's plan, or of all plans for its workers, ranked.

    `hardware: here` is this machine with as many workers as the plan, launch.workers or its cores say; a named cluster
    is taken whole unless launch.workers says otherwise.

    Args:
        console: where progress is told: on a terminal plan by plan, else by a line at the beginning. None: stderr.
    """
    console = console or Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.print("looking at plans: up to minutes for many workers")
    with busy("looking at plans", console) as tell:
        return _found(config, tell)


def _found(config: Config, tell: Callable[[str], None]) -> Planned:
    given = Plan.of(config.plan) if isinstance(config.plan, dict) else None
    workers = given.world if given is not None else config.launch.workers
    if config.hardware != "here":
        cluster = Cluster.parse(config.hardware)
        found = plan(subject(config), cluster, given, world=workers, tell=tell)
        return Planned(replace(found, notes=(*found.notes, *_part(cluster, workers, given is not None))))
    count = workers or default_workers()
    crowd = loaded()  # before forecasts make it so
    found = plan(subject(config), here(count), given, world=workers, tell=tell)
    return Planned(replace(found, notes=(*found.notes, *crowded(count, config.launch.threads), *crowd)))


@dataclass(frozen=True)
class Compared:
    """All schedules over the config's model, as a command shows them."""

    found: Schedules
    title: str

    @property
    def ok(self) -> bool:
        """Some schedule fits."""
        return self.found.ok

    def to_dict(self) -> dict[str, Any]:
        """All that was forecast."""
        return {"about": self.title} | self.found.to_dict()

    def text(self) -> str:
        """The tables."""
        return rendered([self.title, *self.found.tables()])


def compared(config: Config, console: Console | None = None) -> Compared:
    """Every schedule over the config's model, machine and workers.

    Args:
        console: as `outlook`.
    """
    console = console or Console(stderr=True, highlight=False)
    given = Plan.of(config.plan) if isinstance(config.plan, dict) else None
    workers = config.launch.workers or (given.world if given is not None and given.world > 1 else None)
    if config.hardware == "here":
        workers = workers or default_workers()
        cluster = here(workers)
    else:
        cluster = Cluster.parse(config.hardware)
    asked = subject(config)
    with busy("looking at schedules", console) as tell:
        found = schedules(Traces(asked), cluster, given, world=workers, tell=tell)
    machine = f"{cluster.nodes} x {cluster.devices_per_node} x {cluster.device.name}"
    return Compared(found, f"{asked.name} on {machine}, {asked.rows} row{'s'[: asked.rows > 1]} a step")


def _part(cluster: Cluster, workers: int | None, given: bool) -> tuple[str, ...]:
    """Why devices are left over, if some are."""
    devices = cluster.nodes * cluster.devices_per_node
    if workers is None or workers >= devices:
        return ()
    reason = "the plan asks for no more" if given else "launch.workers says so; leave it out to use all"
    return (f"{workers} of {devices} devices are used: {reason}",)
