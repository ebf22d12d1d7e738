"""A plan is the value of the four choices: frozen, comparable, readable and writable as a plain mapping."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from fourfold.plan.grid import Grid, nearest
from fourfold.plan.protocols import Codec
from fourfold.plan.technique import Technique, TechniqueError, spelled, techniques

SHARD = ("none", "optimizer", "gradients", "parameters")
RECOMPUTE = ("none", "selective", "full")
PRECISION = ("fp32", "bf16", "fp64")
KERNELS = ("plain", "tuned")
AXES = ("x", "y", "z", "data", "pipe", "context", "expert")
"""The mesh axes, fastest first."""


class PlanError(ValueError):
    """A plan that cannot be: says which setting, what was expected and found, and what to try."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where every tensor lives.

    Attributes:
        data: replicas; each takes its share of the batch. Never shards.
        z: ranks over which the rows of every stored weight (and of the batch) are cut.
        tensor: the algorithm by which features are cut, and its grid; None: they are not. A z of its own is the
            placement's, and means shard: parameters where that is not said.
        pipe: workers of a pipeline; the schedule says which stages of the model each of them runs, and when.
        cut: how many layers each stage has, first stage first; None: as even as can be.
        shard: what stays cut over z between uses: the optimizer state (ZeRO-1), also gradients (ZeRO-2), also
            parameters (ZeRO-3, FSDP). "none" needs z = 1.
        recompute: what backward computes again: nothing, the attention core ("selective"), or whole blocks ("full").
        precision: of compute and of moving weights; master weights and the optimizer stay in fp32 (fp64: all in fp64).
        overlap: gather the next unit's weights and scatter gradients while units compute; off: the same collectives,
            waited for at once (the bits are the same).
        bucket: smallest message in bytes; neighbours are merged until they reach it (0: one message a block). None:
            25 MiB for plain replicas (as torch's DDP), 4 MiB where optimizer states or gradients are sharded, one
            message a block where parameters are.
        chunks: pieces of rows that a cut linear's product is made in where its input is gathered or its output summed,
            so that a piece travels while the next is multiplied (1: whole; FLUX's idea).
        kernels: how the matrices of cut linears are multiplied: as they lie ("plain"), or in the layout that the first
            step found to be fastest, call site by call site ("tuned"). A choice by time does not repeat to the bit.
    """

    data: int = 1
    z: int = 1
    tensor: Technique | None = None
    pipe: int = 1
    cut: tuple[int, ...] | None = None
    shard: str = "none"
    recompute: str = "none"
    precision: str = "fp32"
    overlap: bool = True
    bucket: int | None = None
    chunks: int = 1
    kernels: str = "plain"

    def __post_init__(self) -> None:
        for count in ("data", "z", "chunks", "pipe"):
            size = getattr(self, count)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise PlanError(f"plan.placement.{count}: expected a whole number of at least 1, found {size!r}")
        choices = {"shard": SHARD, "recompute": RECOMPUTE, "precision": PRECISION, "kernels": KERNELS}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                near = get_close_matches(str(value), allowed, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise PlanError(f"plan.placement.{name}: expected one of {', '.join(allowed)}, found {value!r}{hint}")
        if not isinstance(self.overlap, bool):
            raise PlanError(f"plan.placement.overlap: expected true or false, found {self.overlap!r}")
        if self.bucket is not None and (
            not isinstance(self.bucket, int) or isinstance(self.bucket, bool) or self.bucket < 0
        ):
            raise PlanError(f"plan.placement.bucket: expected a number of bytes of at least 0, found {self.bucket!r}")
        if self.cut is not None:
            self._take_cut(self.cut)
        if self.tensor is not None:
            self._take_grid(self.tensor)
        for name, usual in (("chunks", 1), ("kernels", "plain")):
            if getattr(self, name) != usual and not self.grid.cuts_features:
                raise PlanError(
                    f"plan.placement.{name}: {getattr(self, name)} is for linears that plan.placement.tensor cuts over "
                    f"x or y, found none; leave {name} out, or name an algorithm with x or y above 1"
                )
        if self.shard == "none" and self.z > 1:
            raise PlanError(
                f"plan.placement.z: z = {self.z} cuts weights, but shard is 'none'; "
                f"say shard: optimizer, gradients or parameters, or use data: {self.z} for plain replicas"
            )

    def _take_cut(self, cut: Any) -> None:
        numbers = list(cut) if isinstance(cut, tuple | list) else None
        if numbers is None or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in numbers):
            raise PlanError(f"plan.placement.cut: expected whole numbers of at least 1, one a stage, found {cut!r}")
        object.__setattr__(self, "cut", tuple(numbers))

    def _take_grid(self, tensor: Technique) -> None:
        for name, flag in _options(tensor, "bool").items():
            if not isinstance(flag, bool):
                raise PlanError(f"plan.placement.tensor.{name}: expected true or false, found {flag!r}")
        for name, size in _options(tensor, "int").items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise PlanError(f"plan.placement.tensor.{name}: expected a whole number of at least 1, found {size!r}")
        z = tensor.module.grid(tensor.options).z
        if z > 1 and self.z not in (1, z):
            raise PlanError(
                f"plan.placement.z: expected {z}, as plan.placement.tensor says, found {self.z}; leave it out"
            )
        if z > 1:
            object.__setattr__(self, "z", z)
            object.__setattr__(self, "shard", "parameters" if self.shard == "none" else self.shard)

    @property
    def grid(self) -> Grid:
        """Over how many ranks features and rows are cut."""
        if self.tensor is None:
            return Grid(z=self.z)
        return dataclasses.replace(self.tensor.module.grid(self.tensor.options), z=self.z)

    @property
    def message(self) -> int:
        """Smallest message in bytes."""
        if self.bucket is not None:
            return self.bucket
        return {"none": 25 << 20, "optimizer": 4 << 20, "gradients": 4 << 20, "parameters": 0}[self.shard]

    @property
    def parts(self) -> int:
        """Over how many ranks the rows of a batch are cut: z x data, with the copies that a tensor algorithm brings."""
        return self.z * self.data * self.grid.copies

    @property
    def world(self) -> int:
        """How many ranks this placement needs."""
        return math.prod(self.axes().values())

    def axes(self) -> dict[str, int]:
        """Sizes of the mesh axes, fastest first."""
        grid = self.grid
        return {"x": grid.x, "y": grid.y, "z": self.z, "data": self.data * grid.copies, "pipe": self.pipe}

    def fitting(self, world: int) -> str:
        """What to change for so many ranks, in words: with the most similar tensor grids, where there is one."""
        if self.tensor is None:
            return "change plan.placement.data and z"
        if hasattr(self.tensor.options, "q"):
            return self._squares(world)
        if not hasattr(self.tensor.options, "x"):
            return "change plan.placement.tensor.y, data or z"
        axes = {axis: size for axis, size in self.axes().items() if size > 1 or axis in ("x", "y")}
        grids = (
            ", ".join(f"{axis} {size}" for axis, size in zip(axes, sizes, strict=True))
            for sizes in nearest(tuple(axes.values()), world)
        )
        return (
            f"change plan.placement: by numbers alone, the nearest grids of {world} are {' and '.join(grids)}; "
            "`fourfold plan` tells whether the model can be cut so"
        )

    def _squares(self, world: int) -> str:
        """The sizes q of a square algorithm that divide so many ranks, the most similar first, in words."""
        assert self.tensor is not None
        options, replicas = self.tensor.options, "d" if hasattr(self.tensor.options, "d") else "data"
        alone = dataclasses.replace(options, d=1) if replicas == "d" else options
        sizes = [(q, self.tensor.module.grid(dataclasses.replace(alone, q=q)).ranks) for q in range(2, world + 1)]
        fits = sorted((one for one in sizes if world % one[1] == 0), key=lambda one: abs(math.log(one[0] / options.q)))
        if not fits:
            return f"take another algorithm: no q above 1 makes a {self.tensor.spelling} grid of {world} ranks"
        ways = " or ".join(f"q {q}, {replicas} {world // ranks}" for q, ranks in fits[:2])
        return (
            f"change plan.placement: by numbers alone, {world} ranks are {self.tensor.spelling} with {ways}; "
            "`fourfold plan` tells whether the model can be cut so"
        )

    def to_dict(self) -> dict[str, Any]:
        """The plain mapping that `Plan.of` reads back to an equal placement."""
        plain = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        if self.cut is None:
            del plain["cut"]
        else:
            plain["cut"] = list(self.cut)
        if self.tensor is None:
            del plain["tensor"]
        else:
            settings = self.tensor.to_dict()
            plain["tensor"] = {"algorithm": settings.pop("name"), **settings}
        return plain


@dataclasses.dataclass(frozen=True)
class Wire:
    """In which form traffic crosses: one codec for each kind of traffic that a codec may take (None: as it is)."""

    gradient: Technique | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Placement, schedule, wire, sync."""

    placement: Placement = dataclasses.field(default_factory=Placement)
    schedule: Technique = dataclasses.field(default_factory=lambda: Technique.find("schedule", "accumulate"))
    wire: Wire = dataclasses.field(default_factory=Wire)
    sync: Technique = dataclasses.field(default_factory=lambda: Technique.find("sync", "bsp"))

    def __post_init__(self) -> None:
        if self.placement.pipe > 1 and self.schedule.name == "accumulate":
            raise PlanError(
                f"plan.schedule: accumulate runs on one worker, and plan.placement.pipe is {self.placement.pipe}; "
                "name a pipeline's schedule, for example {name: 1f1b, microbatches: 8}"
            )

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None = None) -> Plan:
        """Read a plan from a plain mapping (what a file holds under `plan:`).

        Raises:
            PlanError: an unknown key (with the nearest name) or a value that cannot be.
        """
        settings = dict(settings or {})
        _known("plan", settings, ("placement", "schedule", "wire", "sync"))
        placement = _mapping("plan.placement", settings.get("placement"))
        _known("plan.placement", placement, [entry.name for entry in dataclasses.fields(Placement)])
        if placement.get("tensor") is not None:
            placement["tensor"] = _technique("plan.placement.tensor", "tensor", placement["tensor"], None, "algorithm")
        wire = _mapping("plan.wire", settings.get("wire"))
        _known("plan.wire", wire, [entry.name for entry in dataclasses.fields(Wire)])
        return cls(
            placement=Placement(**placement),
            schedule=_technique("plan.schedule", "schedule", settings.get("schedule"), "accumulate"),
            wire=Wire(**{kind: _technique(f"plan.wire.{kind}", "codec", value, None) for kind, value in wire.items()}),
            sync=_technique("plan.sync", "sync", settings.get("sync"), "bsp"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The plain mapping that `of` reads back to an equal plan."""
        wire = {entry.name: getattr(self.wire, entry.name) for entry in dataclasses.fields(Wire)}
        return {
            "placement": self.placement.to_dict(),
            "schedule": self.schedule.to_dict(),
            "wire": {kind: codec.to_dict() for kind, codec in wire.items() if codec is not None},
            "sync": self.sync.to_dict(),
        }

    @property
    def world(self) -> int:
        """How many ranks this plan needs."""
        return self.placement.world

    def replica_codec(self) -> Codec | None:
        """The form in which gradients cross between replicas: what the plan says, or the type that weights move in."""
        chosen = self.wire.gradient
        if chosen is None and self.placement.precision == "bf16":
            chosen = Technique.find("codec", "bf16")
        return None if chosen is None else chosen.module.Codec(chosen.options)

    def tallies_ride(self) -> bool:
        """A step's tallies travel behind a gradient: all ranks sum it, whole and uncoded."""
        return (
            self.placement.parts > 1
            and self.placement.z == 1
            and self.placement.pipe == 1
            and self.sync.module.Rule.sums
            and self.replica_codec() is None
        )

    @property
    def inexact(self) -> tuple[str, ...]:
        """Why this plan's numbers differ from serial ones, each with its bound; empty for an exact plan."""
        reasons = []
        if self.placement.precision == "bf16" and self.world > 1:
            reasons.append(
                "gradients cross in bf16: each rank's addend is rounded once, "
                "so a sum is off by at most 2**-8 of the sum of the addends' magnitudes"
            )
        if self.wire.gradient is not None and self.world > 1:
            codec = self.wire.gradient.module.Codec(self.wire.gradient.options)
            if not codec.exact:
                reasons.append(f"gradients cross as {self.wire.gradient.name}: contraction {codec.contraction:g}")
        rule = self.sync.module.Rule
        if not rule.exact:
            reasons.append(f"replicas agree by {self.sync.name}, which is not bulk-synchronous")
        return tuple(reasons)

    @property
    def exact(self) -> bool:
        """This plan's run equals the serial one up to the rounding of sums taken in another order."""
        return not self.inexact

    def __str__(self) -> str:
        place = self.placement
        words = [f"data {place.data}"] if place.data > 1 or place.world == 1 else []
        if place.tensor is not None:
            sizes = (f"{axis} {size}" for axis, size in _options(place.tensor, "int").items() if axis != "z")
            flags = (name for name, flag in _options(place.tensor, "bool").items() if flag)
            words.append(" ".join([place.tensor.spelling, *sizes, *flags]))
        if place.z > 1:
            words.append(f"z {place.z} shard {place.shard}")
        words += [f"pipe {place.pipe}"] if place.pipe > 1 else []
        words += [f"recompute {place.recompute}"] if place.recompute != "none" else []
        words += [f"chunks {place.chunks}"] if place.chunks > 1 else []
        words += [f"kernels {place.kernels}"] if place.kernels != "plain" else []
        words += [place.precision] if place.precision != "fp32" else []
        microbatches = getattr(self.schedule.options, "microbatches", 1)
        plain = microbatches == 1 and self.schedule.name == "accumulate"
        words += [] if plain else [f"{self.schedule.name} {microbatches}"]
        words += [f"gradient as {self.wire.gradient.name}"] if self.wire.gradient else []
        words += [self.sync.name] if self.sync.name != "bsp" else []
        return ", ".join(words)


def _options(tensor: Technique, kind: str) -> dict[str, Any]:
    """The options of a tensor algorithm that its file declares as this type: sizes of axes are "int"."""
    return {
        one.name: getattr(tensor.options, one.name) for one in dataclasses.fields(tensor.options) if one.type == kind
    }


def _known(where: str, settings: Mapping[str, Any], allowed: Any) -> None:
    for key in settings:
        if key not in allowed:
            near = get_close_matches(str(key), list(allowed), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise PlanError(f"{where}.{key}: no such setting{hint}; expected one of {', '.join(allowed)}")


def _mapping(where: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise PlanError(f"{where}: expected a mapping of settings, found {value!r}")
    return dict(value)


def _technique(where: str, room: str, value: Any, default: str | None, key: str = "name") -> Any:
    """The technique called what `value` says under `key`, or is; its other keys are options."""
    if value is None:
        return Technique.find(room, default) if default else None
    if isinstance(value, str):
        value = {key: value}
    settings = _mapping(where, value)
    for typed in get_close_matches(key, list(map(str, settings)), n=1) if key not in settings else ():
        raise PlanError(f"{where}.{typed}: no such setting (did you mean {key!r}?)")
    name = settings.pop(key, default)
    if not isinstance(name, str):
        found = "nothing" if name is None else repr(name)
        raise PlanError(f"{where}.{key}: expected one of {', '.join(map(spelled, techniques(room)))}, found {found}")
    try:
        return Technique.find(room, name, settings)
    except (TechniqueError, TypeError, ValueError) as error:
        raise PlanError(f"{where}: {error}") from error
