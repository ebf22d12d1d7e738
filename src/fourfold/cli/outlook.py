"""`fourfold plan`: the config's model and machine, as the planner wants to be asked."""

from __future__ import annotations

from fourfold.config import Config
from fourfold.hardware import Cluster
from fourfold.plan import Plan
from fourfold.planner import Outlook, here, plan
from fourfold.training.choice import default_workers
from fourfold.training.subject import subject


def outlook(config: Config) -> Outlook:
    """The forecast of the config's plan, or of all plans for its workers, ranked.

    `hardware: here` is this machine with as many workers as the plan, launch.workers or its cores say; a named cluster
    is taken whole unless launch.workers says otherwise.
    """
    given = Plan.of(config.plan) if isinstance(config.plan, dict) else None
    workers = given.world if given is not None else config.launch.workers
    if config.hardware == "here":
        cluster = here(workers or default_workers())
    else:
        cluster = Cluster.parse(config.hardware)
    return plan(subject(config), cluster, given, world=workers)
