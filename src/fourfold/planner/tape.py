"""The record of a traced step: read from JSON, scaled to any number of rows, unrolled to all blocks of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fourfold.planner.recorder import AFTER, BEFORE, STILL
from fourfold.planner.tap import Message

Key = tuple[str, int, int]
"""A storage: (phase, place, ordinal) of its birth."""


class MismatchError(ValueError):
    """Two traces of different row counts are not the same sequence of operators."""


def blend(first: Any, second: Any, rows: tuple[int, int], wanted: int) -> Any:
    """Extrapolate every whole number of two equal structures: what is affine in the rows is exact at any row count.

    Raises:
        MismatchError: the structures differ in more than numbers.
    """
    if isinstance(first, bool) or isinstance(first, str) or first is None or isinstance(first, float):
        if type(first) is not type(second) or (first != second and not isinstance(first, float)):
            raise MismatchError(f"{first!r} at {rows[0]} rows, {second!r} at {rows[1]}")
        return first
    if isinstance(first, int) and isinstance(second, int):
        if first == second:
            return first
        value, rest = divmod((second - first) * (wanted - rows[0]), rows[1] - rows[0])
        return first + value + (rest > 0)
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [blend(a, b, rows, wanted) for a, b in zip(first, second, strict=True)]
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return {key: blend(first[key], second[key], rows, wanted) for key in first}
    raise MismatchError(f"{type(first).__name__} of another shape at {rows[1]} rows")


@dataclass(frozen=True)
class Event:
    """A storage is born ("+") or dies ("-"), an operator runs ("op"), a message leaves ("send") or is waited for
    ("wait"): by their numbers. Where layers are told apart, the next operator, a product of backward, reads a storage
    ("use")."""

    kind: str
    key: Key | None
    number: int


@dataclass(frozen=True)
class Segment:
    """What happens in one block (or before or after them) in one phase, in order."""

    phase: str
    place: int
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Storage:
    """Bytes of a storage, and the place of the weight whose gradient it is (None: it is none; STILL: any)."""

    nbytes: int
    gradient_of: int | None = None
    mask: bool = False


class Tape:
    """A traced step. Places are unrolled: they count the blocks of the whole model in execution order.

    Attributes:
        rows: of the batch.
        operators: distinct operator calls, by number (name, args, flops, bytes moved, bytes born).
        messages: what is sent over x and y, by number.
        blocks: paths of all blocks in execution order.
        segments: in order of time.
        storages: by key.
        weights: (name, shape, trained) of every weight of the whole model.
        looks: where layers are told apart, what each place returned: (shape, bytes of an element, wants a gradient).
        extents: numbers that tell by what a micro-batch is dealt, where features are cut.
    """

    def __init__(self, plain: dict[str, Any]):
        self.rows: int = plain["rows"]
        self.operators: list[dict[str, Any]] = plain["operators"]
        self.messages = [Message(*message) for message in plain["messages"]]
        self.buffer_bytes: int = plain["buffer_bytes"]
        self.batch_bytes: int = plain["batch_bytes"]
        self.blocks: list[str] = [path for image in plain["images"] for path in image]
        self._first, count = [], 0
        for image in plain["images"]:
            self._first.append(count)
            count += len(image)
        self._copies = [len(image) for image in plain["images"]]
        self._plain = plain
        self.weights = [(name, tuple(shape), trained) for name, shape, trained in plain["weights"]]
        self.looks = [
            [(tuple(shape), size, grad) for shape, size, grad in looks]
            for image, looks in zip(plain["images"], plain["looks"], strict=True)
            for _ in image
        ]
        self.extents: int = plain["extents"]
        self.storages: dict[Key, Storage] = {}
        self.segments = list(self._unrolled())

    # ---- unrolling

    def _unrolled(self) -> Iterator[Segment]:
        """Every segment of a block that stands for several is repeated: onwards in forward, backwards in backward."""
        gradients = dict(self._plain["gradients"])
        for phase, place, events in self._plain["segments"]:
            copies = range(self._copies[place]) if place < len(self._copies) and place >= 0 else range(1)
            for copy in copies if phase == "forward" else reversed(copies):
                yield self._segment(phase, place, copy, events, gradients)

    def _segment(self, phase: str, place: int, copy: int, events: list[Any], gradients: dict[int, str]) -> Segment:
        here = self._real(place, copy)
        unrolled: list[Event] = []
        for kind, number in events:
            if kind not in ("+", "-", "use"):
                unrolled.append(Event(kind, None, number))
                continue
            born_phase, born_place, ordinal, nbytes, tag, itemsize = self._plain["storages"][number]
            if kind == "+":
                key = (phase, here, ordinal)
                homes = {"block": here, "before": BEFORE, "after": AFTER, "still": STILL}
                owner = homes.get(gradients.get(number, ""))
                self.storages[key] = Storage(nbytes, owner, tag == "mask")
                unrolled.append(Event("+", key, number))
                continue
            for real in self._near(born_place, place, copy):
                unrolled.append(Event(kind, (born_phase, real, ordinal), number))
        return Segment(phase, here, tuple(unrolled))

    def _real(self, place: int, copy: int) -> int:
        return place if place in (BEFORE, AFTER) else self._first[place] + copy

    def _near(self, target: int, place: int, copy: int) -> list[int]:
        """The unrolled places that a mention of traced place `target` means inside a copy of `place`.

        A neighbour is the neighbour of the copy; a far block that stands for several means all of them.
        """
        if target in (BEFORE, AFTER):
            return [target]
        if place not in (BEFORE, AFTER) and abs(target - place) <= 1:
            return [self._first[place] + copy if target == place else self._neighbour(target, place, copy)]
        return [self._first[target] + other for other in range(self._copies[target])]

    def _neighbour(self, target: int, place: int, copy: int) -> int:
        return self._first[place] + copy + (target - place)
