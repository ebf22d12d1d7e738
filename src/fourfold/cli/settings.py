"""Configs as commands read them: the schema, and what the rooms above it know about plans, paths and hardware."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fourfold.config import Config, ConfigError, Loaded, Origins, Problem, resolved
from fourfold.config import load as load_config
from fourfold.config.paths import missing
from fourfold.config.problem import nearest

NEWEST = 3
"""Runs that are named where the one that was asked for is not there."""


def load(path: str, overrides: Iterable[str]) -> Loaded:
    """A config that is about to run: also its plan, its paths and its hardware are checked.

    Raises:
        ConfigError: everything that is wrong, each with its origin.
    """
    return load_config(path, overrides, (plan_problems, missing, hardware_problems))


def load_run_or_config(path: str, overrides: Sequence[str]) -> tuple[Loaded, Path | None]:
    """A config file, or that of a run's folder, with the folder.

    Raises:
        ConfigError: as `load`; or settings were given for a run, which is what it was.
    """
    if not Path(path).is_dir():
        _no_part_of_a_run(path)
        return load(path, overrides), None
    if overrides:
        found, config = " ".join(overrides), Path(path) / "config.yaml"
        text = f"a run's folder is verified as it was run, found {found} as well; name {config} to change settings"
        raise ConfigError([Problem("command line", "", text)])
    return load(str(Path(path) / "config.yaml"), ()), Path(path)


def speaks() -> bool:
    """This process tells what a run came to: under torchrun the first rank does, for all."""
    return os.environ.get("RANK", "0") == "0"


def load_any(arguments: Sequence[str]) -> Loaded:
    """A config to look at: `[CONFIG] [key.path=value …]`; paths are not looked at."""
    path = arguments[0] if arguments and (Path(arguments[0]).is_file() or "=" not in arguments[0]) else None
    return load_config(path, arguments[path is not None :], (plan_problems,))


def plan_problems(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the plan's own reader refuses."""
    plan = settings.get("plan", "auto")
    if isinstance(plan, Mapping):
        from fourfold.plan import Plan, PlanError

        try:
            Plan.of(plan)
        except PlanError as error:
            problem = Origins("", {}).blame(str(error))
            yield problem.key or "plan", problem.text


def hardware_problems(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A machine that is neither here, nor in the catalogue, nor in a file that can be read."""
    hardware = settings.get("hardware", "here")
    if isinstance(hardware, str) and hardware not in ("", "here"):
        from fourfold.hardware import Cluster, ClusterError

        try:
            Cluster.parse(hardware)
        except ClusterError as error:
            yield "hardware", str(error).removeprefix("hardware: ")


@contextmanager
def blaming(loaded: Loaded) -> Iterator[None]:
    """Errors of the rooms below that begin with a setting's key are told with where that setting was written.

    Raises:
        ConfigError: instead of such an error.
    """
    try:
        yield
    except ValueError as error:
        ours = type(error).__module__.startswith("fourfold.") and not isinstance(error, ConfigError)
        problem = loaded.origins.blame(str(error))
        if not ours or not _is_setting(problem.key, loaded.config):
            raise
        raise ConfigError([problem]) from error


def _is_setting(key: str, config: Config) -> bool:
    """Whether a key begins with a section and, after it, one of its settings: a weight may be called `model.layers.0`,
    too."""
    name, _, rest = key.partition(".")
    section = getattr(config, name, None) if name in Config.model_fields else None
    if isinstance(section, BaseModel) and rest:
        return rest.partition(".")[0] in type(section).model_fields
    return name in Config.model_fields


def positive(option: str, value: int) -> None:
    """Refuse an option that must be at least 1."""
    if value < 1:
        raise ConfigError([Problem("command line", option, f"expected a whole number of at least 1, found {value}")])


def without(option: str, given: bool, why: str) -> None:
    """Refuse an option that another one leaves no meaning."""
    if given:
        raise ConfigError([Problem("command line", option, f"cannot be had {why}")])


def among(what: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Refuse names that are not known, with the nearest one that is."""
    wrong = [name for name in names if name not in known]
    texts = [f"no {what} {name!r}{nearest(name, known)}; there is {', '.join(known)}" for name in wrong]
    if texts:
        raise ConfigError(Problem("command line", "", text) for text in texts)


def run_folder(path: str) -> str:
    """Refuse what is not a folder, with the nearest name, or the newest runs that there are."""
    _no_part_of_a_run(path)
    if not Path(path).is_dir():
        beside = Path(path).parent
        names = sorted(entry.name for entry in beside.iterdir() if entry.is_dir()) if beside.is_dir() else []
        advice = nearest(Path(path).name, names) or _newest(beside, names)
        found = f"expected a run's folder, found no {path!r}{advice}; runs lie in run.folder"
        raise ConfigError([Problem("command line", "", found)])
    return path


def _newest(beside: Path, names: Sequence[str]) -> str:
    """` (the newest there: runs/b, runs/a)`, or nothing where there is no run."""
    configs = [config for name in names if (config := beside / name / "config.yaml").is_file()]
    found = sorted(configs, key=lambda config: config.stat().st_mtime, reverse=True)[:NEWEST]
    return f" (the newest there: {', '.join(str(config.parent) for config in found)})" if found else ""


def _no_part_of_a_run(path: str) -> None:
    """Refuse a file of a run, such as its report, where the run's folder is meant; its config is a config."""
    file, folder = Path(path), Path(path).parent
    if file.is_file() and file.suffix not in (".yaml", ".yml", ".toml") and (folder / "config.yaml").is_file():
        text = f"expected a run's folder, found the file {file.name!r} in it; name the folder: {folder}"
        raise ConfigError([Problem("command line", "", text)])


@dataclass(frozen=True)
class Resolved:
    """A whole config, defaults included."""

    config: Config
    ok: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return self.config.to_dict()

    def text(self) -> str:
        """The YAML file that gives this config."""
        return resolved(self.config).rstrip("\n")


@dataclass(frozen=True)
class Schema:
    """The JSON schema of a config."""

    ok: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The schema, draft 2020-12."""
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}

    def text(self) -> str:
        """The schema as JSON text."""
        from fourfold.cli.outcome import encode

        return encode(self.to_dict())
