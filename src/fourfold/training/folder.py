"""The folder of one run: where everything that it writes lies, and nothing else.

config.yaml       the resolved configuration, plan and name included
origin.json       versions, command, git state, why this plan was chosen
journal.jsonl     one line a step, an evaluation, a checkpoint
checkpoints/      one folder a checkpoint
ranks/<attempt>/  who runs as which rank, and why one failed
logs/             what each rank printed
ledger/           bytes, memory and spans of each rank, and the forecast; earlier-<n>/: those of plans before the last
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.config import Config, load, resolved
from fourfold.training import changes, checkpoint, journal
from fourfold.training.checkpoint import manifest


class FolderError(ValueError):
    """A run folder that cannot be used: says which, why, and what to try."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def origin(self) -> Path:
        """Versions, command and git state."""
        return self.path / "origin.json"

    @property
    def journal(self) -> Path:
        """One JSON line a step."""
        return self.path / "journal.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of all checkpoints of this run."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """What the ranks printed."""
        return self.path / "logs"

    @property
    def ledger(self) -> Path:
        """What was forecast and what each rank measured."""
        return self.path / "ledger"

    def ranks(self, attempt: int) -> Path:
        """Who runs as which rank in this attempt (0, then one more for each restart)."""
        return self.path / "ranks" / str(attempt)

    def read_config(self) -> Config:
        """The resolved configuration.

        Raises:
            ConfigError: it was changed by hand into something that is no configuration.
        """
        return load(str(self.config)).config

    def write_config(self, config: Config) -> None:
        """Write the resolved configuration, at once or not at all."""
        write_text(self.config, resolved(config))


def create(config: Config) -> RunFolder:
    """Make the folder of a new run, or find the one to resume.

    Args:
        config: `run.folder`, `run.name` and `run.resume` decide.

    Raises:
        FolderError: the name is taken, nothing is there to resume, or the folder cannot be written.
    """
    runs = Path(config.run.folder)
    if config.run.resume:
        return _resumed(config, runs)
    name = config.run.name or _name(config, time.time())
    folder = RunFolder(runs / name)
    try:
        folder.path.mkdir(parents=True, exist_ok=False)
    except FileExistsError as error:
        raise _taken(folder) from error
    except OSError as error:
        raise FolderError(
            f"run.folder: cannot make {folder.path} ({error.strerror}); set run.folder to a place that can be written"
        ) from error
    return folder


def check(config: Config) -> None:
    """Look, before anything is read or planned, whether a new run's name is free, or an old run has steps left.

    A run that was killed after its last step, while it evaluated, has not ended and may go on.

    Raises:
        FolderError: it has ended at its last step or beyond; or it cannot be begun or resumed, as `create` would say.
        CheckpointError: its newest checkpoint is damaged.
    """
    if not config.run.resume:
        new = RunFolder(Path(config.run.folder) / (config.run.name or ""))
        if config.run.name is not None and new.path.exists():
            raise _taken(new)
        return
    folder = _resumed(config, Path(config.run.folder))
    newest = checkpoint.latest(folder.checkpoints)
    done, wanted = manifest.read(newest).step if newest is not None else 0, config.train.steps
    ended = any(record["kind"] == "end" for record in journal.read(folder.journal))
    if done > wanted or (done == wanted and ended):
        raise FolderError(
            f"run.resume: run {folder.path} is already at step {done} of {wanted}; raise train.steps to go on"
        )


def describe_origin(why: Iterable[str]) -> dict[str, Any]:
    """What a reader of the run needs to repeat it: versions, machine, command, git state, and why this plan."""
    packages = ("fourfold", "torch", "numpy", "transformers", "tokenizers", "safetensors")
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "versions": {name: _version(name) for name in packages},
        "git": _git(),
        "launcher": launcher(),
        "plan": list(why),
    }


def set_aside(folder: RunFolder) -> Path | None:
    """Move what was forecast, measured and verified under an earlier plan into a folder of its own, and name it.

    A report mixes ranks of two plans otherwise. None: there was nothing.
    """
    found = [*sorted(folder.ledger.glob("*.json")), *folder.path.glob("verify.json")]
    if not found:
        return None
    aside = folder.ledger / f"earlier-{1 + len(list(folder.ledger.glob('earlier-*')))}"
    aside.mkdir()
    for path in found:
        path.rename(aside / path.name)
    return aside


def launcher() -> str | None:
    """Who started the ranks: torchrun's run and meeting point; None where nobody did."""
    if "RANK" not in os.environ:
        return None
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}@{os.environ.get('MASTER_PORT', '?')}"


def started_by(runs: Path, name: str | None) -> RunFolder | None:
    """The run that this launcher started earlier (its group failed and is started again), or None."""
    for path in sorted(runs.glob("*/origin.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        if json.loads(path.read_text(encoding="utf-8")).get("launcher") == name:
            return RunFolder(path.parent)
    return None


def write_json(path: Path, value: object) -> None:
    """Write JSON aside and rename it: a reader sees all of it or nothing."""
    write_text(path, json.dumps(value, indent=1))


def write_text(path: Path, text: str) -> None:
    """Write text aside and rename it.

    Raises:
        FolderError: the file cannot be written (read-only folder, full disk).
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True) if path.parent.is_dir() else None
        raise FolderError(f"cannot write {path} ({error.strerror}); free some space or set run.folder") from error


def _taken(folder: RunFolder) -> FolderError:
    return FolderError(f"run.name: {folder.path} is taken; go on with it by --resume, or choose another run.name")


def _name(config: Config, at: float) -> str:
    digest = hashlib.sha256(resolved(config).encode()).hexdigest()[:6]
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(at)) + f"-{digest}"


def _resumed(config: Config, runs: Path) -> RunFolder:
    if config.run.name is not None:
        folder = RunFolder(runs / config.run.name)
        if not folder.config.is_file():
            raise FolderError(f"run.resume: no run at {folder.path}; check run.folder and run.name")
    else:
        found = sorted(runs.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise FolderError(f"run.resume: no run in {runs}; check run.folder, or leave out --resume")
        folder = RunFolder(found[-1].parent)
    changed = changes.refused(folder.read_config(), config)
    if changed:
        values = "; ".join(f"{key} was {before}, is {now}" for key, (before, now) in changed.items())
        raise FolderError(
            f"run.resume: {', '.join(changed)} changed since {folder.path} was started ({values}); a resumed run keeps "
            "them. Use that folder's config.yaml, or start a new run"
        )
    return folder


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Commit and changed files of the folder in which the command runs; None where it is no repository."""
    try:
        commit = _output("git", "rev-parse", "HEAD")
        return {"commit": commit, "changed": _output("git", "status", "--porcelain").splitlines()}
    except (OSError, subprocess.SubprocessError):
        return None


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
