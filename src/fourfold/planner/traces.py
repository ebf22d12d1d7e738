"""The traces of one subject, made when they are asked for and kept: a search over many plans needs a handful."""

from __future__ import annotations

import dataclasses
from math import lcm
from typing import Any

import torch

from fourfold import torch_private
from fourfold.anatomy import Anatomy, restored
from fourfold.plan.grid import Grid
from fourfold.planner import workspace
from fourfold.planner.isolate import IsolationError, isolated
from fourfold.planner.line import Line, lined
from fourfold.planner.subject import Subject
from fourfold.planner.tape import MismatchError, Tape, blend
from fourfold.planner.trace import Settings, TraceError, UnrunnableError, local_shapes, outline, record

FEWEST = 2
"""Rows that are traced, and some more: what is affine in them follows for any number. (One row is special: dims of one
collapse.)"""

WAYS = ({"real": False, "short": True}, {"real": False, "short": False}, {"real": True, "short": True})
"""How a model is run, the cheapest first."""


class CutError(ValueError):
    """The model cannot be cut as a plan asks: says what placement would say."""


class Traces:
    """Traces of a subject by row count and setting."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self.failures: list[str] = []
        """Why cheaper ways did not run."""
        self._outline: dict[str, Any] | None = None
        self._way = 0
        self._sorted: dict[tuple[Any, ...], list[Any]] = {}
        self._workspace: dict[Settings, list[int]] = {}
        self._pairs: dict[Settings, list[dict[str, Any]]] = {}
        self._tapes: dict[Settings, Tape] = {}
        self._local: dict[Grid, dict[str, Any]] = {}
        self._line: dict[str, Any] | None = None

    @property
    def outline(self) -> dict[str, Any]:
        """What the model is: "anatomy", and "units" as [name, blocks, [weight, shape, group], outer, still] in order.

        Raises:
            UnrunnableError: it does not run.
            TraceError: it cannot be built without values.
        """
        if self._outline is None:
            _warm()
            try:
                found: dict[str, Any] = isolated(lambda: outline(self.subject))
            except IsolationError as error:
                raise TraceError(f"{self.subject.name}: cannot find out what the model is: {error}") from error
            if "unrunnable" in found:
                raise UnrunnableError(f"{self.subject.name}: {found['unrunnable']}")
            self._outline = found
        return self._outline

    @property
    def anatomy(self) -> Anatomy:
        """Blocks, ties and order of use."""
        return restored(self.outline["anatomy"])

    @property
    def line(self) -> Line:
        """The layers that a pipeline is cut out of.

        Raises:
            PlacementError: the model is no line of layers.
        """
        if self._line is None:
            found: dict[str, Any] = isolated(lambda: lined(self.subject))
            self._line = found
        return Line.of(self._line)

    def units(self, bucket: int, apart: bool, itemsize: int, grid: Grid | None = None) -> list[Any]:
        """The placement's units, as in `outline`, with neighbours merged up to `bucket` bytes.

        Raises:
            CutError: the model cannot be cut over the grid.
        """
        still = frozenset(() if grid is None else self._laid(grid)["still"])
        if not bucket and not still and (apart or not self.outline["anatomy"]["read_outside"]):
            return self.outline["units"]
        key = (bucket, apart, itemsize, still)
        if key not in self._sorted:
            about: dict[str, Any] = {"bucket": bucket, "apart": apart, "itemsize": itemsize, "still": still}
            self._sorted[key] = isolated(lambda: outline(self.subject, **about)["units"])
        return self._sorted[key]

    def local(self, grid: Grid) -> dict[str, list[int]]:
        """Shape of what the first rank of a grid holds of every weight.

        Raises:
            CutError: the model cannot be cut so.
        """
        return self._laid(grid)["shapes"]

    def _laid(self, grid: Grid) -> dict[str, Any]:
        if grid not in self._local:
            anatomy = self.anatomy
            self._local[grid] = isolated(lambda: local_shapes(self.subject, anatomy, grid))
        return _accepted(self._local[grid])

    def tape(self, settings: Settings) -> Tape:
        """The trace at these settings (`real` and `short` are chosen here: the cheapest way that runs).

        Raises:
            CutError: the model cannot be cut over the grid.
            TraceError: the model runs in no way; the message holds the failure of each.
        """
        if settings not in self._tapes:
            self._tapes[settings] = Tape(self._plain(settings))
        return self._tapes[settings]

    def workspace(self, settings: Settings) -> list[int]:
        """What each operator of the tape holds inside itself, measured on this machine's CPU."""
        if settings not in self._workspace:
            operators = self.tape(settings).operators
            pair = self._pairs.get(_pair_of(settings), [])
            small = [plain["operators"] for plain in pair]
            small = small if all(len(row) == len(operators) for row in small) else []
            self._workspace[settings] = workspace.sizes(operators, small)
        return self._workspace[settings]

    def pair(self, settings: Settings) -> list[dict[str, Any]]:
        """The raw traces at the two row counts from which those at `settings.rows` follow."""
        key = _pair_of(settings)
        if key not in self._pairs:
            self._pairs[key] = self._record(settings, (key.rows, key.rows + _period(settings)))
        return self._pairs[key]

    def _plain(self, settings: Settings) -> dict[str, Any]:
        if settings.rows == 1:
            return self._record(settings, (1,))[0]
        try:
            first, second = self.pair(settings)
            few = _pair_of(settings).rows
            return blend(first, second, (few, few + _period(settings)), settings.rows)
        except MismatchError:  # operators depend on the rows: trace these very rows
            return self._record(settings, (settings.rows,))[0]

    def _record(self, settings: Settings, rows: tuple[int, ...]) -> list[dict[str, Any]]:
        anatomy, inputs = self.anatomy, self.outline["inputs"]
        while True:
            way = WAYS[self._way]
            wanted = [dataclasses.replace(settings, rows=count, **way) for count in rows]
            try:
                found = isolated(lambda wanted=wanted: [record(self.subject, anatomy, inputs, one) for one in wanted])
                return [_accepted(one) for one in found]
            except IsolationError as error:
                self.failures.append(f"{'real' if way['real'] else 'fake'} tensors: {error}")
                self._way += 1
                if self._way == len(WAYS):
                    raise TraceError(
                        f"{self.subject.name}: its step runs in no way; " + "; ".join(self.failures)
                    ) from error


def _period(settings: Settings) -> int:
    """Rows after which what is dealt over x and y, or in chunks, is dealt alike again: all counts are affine then."""
    if settings.grid is None:
        return 1
    x, y = settings.grid.x, settings.grid.y
    return lcm(x * y if settings.grid.by_rows else lcm(x, y), settings.chunks)


def _pair_of(settings: Settings) -> Settings:
    """The fewest rows that deal as those asked for do."""
    period = _period(settings)
    fewest = max(FEWEST, period) if settings.grid is not None and settings.grid.by_rows else FEWEST  # one a rank
    return dataclasses.replace(settings, rows=fewest + (settings.rows - fewest) % period)


def _accepted(found: dict[str, Any]) -> dict[str, Any]:
    if "refused" in found:
        raise CutError(found["refused"])
    return found


def _warm() -> None:
    """Import here what every child would otherwise import for itself (torch's symbolic shapes, its compiler)."""
    torch.compiler.disable(_warm)  # type: ignore[call-overload]
    with torch_private.fake_tensors():
        torch.empty(1)
