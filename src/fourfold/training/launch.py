"""`train`: from a configuration to a finished run, in this process, on threads, on local workers, or under torchrun."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from fourfold.config import Config, Loaded
from fourfold.ledger import Ledger
from fourfold.plan import Plan
from fourfold.training import changes, checkpoint, failure, folder, subject
from fourfold.training.agent import Agent
from fourfold.training.choice import Choice, choose, given
from fourfold.training.data import Prepared, prepare
from fourfold.training.folder import RunFolder
from fourfold.training.lock import locked
from fourfold.training.outcome import TrainOutcome
from fourfold.training.progress import Screen, busy, say, screen
from fourfold.training.stop import Stop
from fourfold.training.supervisor import Supervisor
from fourfold.training.trainer import Ending
from fourfold.training.worker import Rank
from fourfold.wire import Axis, Mesh, RankFailed, World, join, threads

LONGEST_PATH = 4096
"""Bytes of a path that ranks agree on."""


class LaunchError(ValueError):
    """A run that cannot be launched: says which setting, what was expected and found, and what to try."""


def train(loaded: Loaded) -> TrainOutcome:
    """Train what a configuration describes.

    Under torchrun (RANK is in the environment) this process is one rank of a group that others started. Otherwise it
    chooses the plan, starts what the plan needs, and reports.

    Raises:
        ValueError: a setting, the data or the run folder is not as it must be (its subclasses say what to try).
    """
    config = loaded.config
    if "RANK" in os.environ:
        return _joined(config)
    folder.check(config)
    data = _data(config)
    with busy("looking at plans") as tell:
        choice = choose(config, tell=tell)
    with ExitStack() as held:
        place = _begin(config, choice, data, held)
        return _trained(place, choice)


def _data(config: Config, workers: int | None = None) -> Prepared:
    """The data: read once the settings are known to be good, and before plans are looked at; what is quick comes first.

    Args:
        workers: how many there are already; None: as many as are wanted.
    """
    given(config, workers)
    subject.builder(config)
    with busy("preparing the text"):
        return prepare(
            config.data, rows=config.train.batch, seed=config.seed, tokenizer_file=subject.tokenizer_file(config)
        )


def _trained(place: RunFolder, choice: Choice) -> TrainOutcome:
    config = place.read_config()
    screens = [screen(config.train.steps)]
    try:
        if choice.plan.world == 1:
            return _alone(place, choice, screens)
        if config.launch.backend == "threads":
            return _threads(place, choice, config, screens)
        return _group(place, choice, config, screens)
    finally:
        for one in screens:
            one.close()


def _begin(config: Config, choice: Choice, data: Prepared, held: ExitStack) -> RunFolder:
    """Make the folder, and write down what will be run.

    Args:
        held: the folder is locked until this is closed.
    """
    say(choice.why)
    place = folder.create(config)
    held.enter_context(locked(place.path))
    say([_amount(data, config), f"run: {place.path}"])
    run = config.run.model_copy(update={"name": place.path.name})
    config = config.model_copy(update={"plan": choice.plan.to_dict(), "run": run})
    if run.resume:
        _tell_changes(place, place.read_config(), config)
    place.write_config(config)
    folder.write_json(place.origin, folder.describe_origin(choice.why))
    if choice.forecast is not None:
        folder.write_json(place.ledger / "forecast.json", choice.forecast.to_dict())
    if data.tokenizer is not None:
        folder.write_text(place.path / "tokenizer.json", data.tokenizer.to_str())
    shutil.rmtree(place.path / "ranks", ignore_errors=True)
    checkpoint.prepare(place.checkpoints)
    return place


def _tell_changes(place: RunFolder, before: Config, now: Config) -> None:
    """Say what is new in a resumed run; what was measured under another plan is set aside."""
    aside = folder.set_aside(place) if changes.replanned(before, now) else None
    if words := changes.plans(before, now):
        say([f"plan: {words}" + (f"; what that one measured is in {aside}" if aside else "")])
    say(changes.told(before, now))


def _amount(data: Prepared, config: Config) -> str:
    """How much there is to train on, in words."""
    source = data.source
    seen = config.train.steps * source.rows * source.sequence / max(1, len(source.train))
    held = f", {len(source.held):,} held out" if len(source.held) else ""
    return (
        f"data: {config.data.name}, {len(source.train):,} tokens to train on{held}; this run sees {seen:.2g} times that"
    )


# ---- in this process


def _alone(place: RunFolder, choice: Choice, screens: list[Screen]) -> TrainOutcome:
    torch.set_num_threads(place.read_config().launch.threads)
    with Stop() as stop:
        rank = Rank(place, screens=screens, stop=stop)
        return _told(place, choice, rank, lambda: rank(join()))


def _threads(place: RunFolder, choice: Choice, config: Config, screens: list[Screen]) -> TrainOutcome:
    torch.set_num_threads(config.launch.threads)
    with Stop() as stop:
        ranks = [Rank(place, screens=screens, stop=stop) for _ in range(choice.plan.world)]

        def body(world: World) -> Ending:
            return ranks[world.rank](world)

        def run() -> Ending:
            try:
                return threads.launch(len(ranks), body, timeout=config.launch.stall_after, stopping=stop)[0]
            except RankFailed as error:
                if isinstance(error.__cause__, ValueError):
                    raise error.__cause__ from error
                raise

        return _told(place, choice, ranks[0], run)


def _told(place: RunFolder, choice: Choice, rank: Rank, run: Callable[[], Ending]) -> TrainOutcome:
    """Run, and turn a failure that is no mistake of the person into an outcome with its traceback on disk."""
    try:
        return _finished(place, choice.plan, run())
    except Exception as error:
        found = failure.of_exception(error, getattr(error, "rank", 0), rank.number, None)
        if found.mistake:
            raise
        told = failure.write(found, place.ranks(0), error)
        return TrainOutcome(place.path, str(choice.plan), failures=(told,), failed=True)


def _finished(place: RunFolder, plan: Plan, ending: Ending) -> TrainOutcome:
    return TrainOutcome(
        place.path,
        str(plan),
        steps=ending.steps,
        stopped=ending.stopped,
        validation=ending.validation,
        sample=ending.sample,
    )


# ---- local workers


def _group(place: RunFolder, choice: Choice, config: Config, screens: list[Screen]) -> TrainOutcome:
    size = choice.plan.world
    agent = Agent(
        ["-m", "fourfold.training.worker", str(place.path)],
        size,
        restarts=config.launch.max_restarts,
        address=config.launch.address,
        logs=place.logs,
        name=place.path.name,
    )
    supervisor = Supervisor(agent, place, size, stall_after=config.launch.stall_after, screens=screens)
    ok = supervisor.run()
    failures = tuple(supervisor.failures)
    if not ok and failures and failures[-1].mistake:
        raise LaunchError(str(failures[-1]))
    if not ok and not failures and agent.error is not None:
        raise LaunchError(
            f"launch: the workers could not be started: {agent.error}; see {place.logs / 'agent.log'}, "
            "or set launch.address to another host:port"
        ) from agent.error
    end = supervisor.ending or {}
    return TrainOutcome(
        place.path,
        str(choice.plan),
        steps=end.get("step"),
        stopped=bool(end.get("stopped")),
        validation=end.get("validation"),
        sample=end.get("sample"),
        failures=failures,
        failed=not ok,
    )


# ---- under torchrun


def _joined(config: Config) -> TrainOutcome:
    """Be one rank of a group that torchrun started: the first one decides, the others are told the folder."""
    torch.set_num_threads(config.launch.threads)
    # Before joining: forecasts run in forked processes, and a process with a backend's threads cannot be forked safely.
    held = ExitStack()
    decided = str(_first_decides(config, held)) if os.environ["RANK"] == "0" else ""
    world = join("auto" if config.launch.backend == "threads" else config.launch.backend, config.launch.stall_after)
    try:
        everyone = Mesh(world, {"data": world.size}, Ledger(rank=world.rank)).over("data")
        place = RunFolder(Path(agree(everyone, decided)))
        config = place.read_config()
        screens = [screen(config.train.steps)] if world.rank == 0 else []
        with Stop(tells=world.rank == 0) as stop:
            ending = Rank(place, screens=screens, stop=stop)(world)
        everyone.barrier()  # every rank's ledger is written before the first one reports
        return _finished(place, _plan_of(config), ending)
    finally:
        held.close()
        world.leave()


def _first_decides(config: Config, held: ExitStack) -> Path:
    """The folder of a run that torchrun has started, or starts again."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        earlier = folder.started_by(Path(config.run.folder), folder.launcher())
        if earlier is not None:
            run = config.run.model_copy(update={"resume": True, "name": earlier.path.name})
            config = config.model_copy(update={"run": run})
    else:
        folder.check(config)
    workers = int(os.environ["WORLD_SIZE"])
    data = _data(config, workers)
    return _begin(config, choose(config, workers), data, held).path


def _plan_of(config: Config) -> Plan:
    return Plan.of(config.plan if isinstance(config.plan, dict) else None)


def agree(everyone: Axis, text: str) -> str:
    """The first rank's text, on every rank."""
    content = text.encode()
    if len(content) > LONGEST_PATH:
        raise LaunchError(f"run.folder: expected a path of at most {LONGEST_PATH} bytes, found {len(content)}")
    padded = content.ljust(LONGEST_PATH, b"\0")
    first = everyone.collect([float(byte) for byte in padded])[0]
    return bytes(int(byte) for byte in first).rstrip(b"\0").decode()
