"""The peak of memory in a step: a small simulation of what comes and goes, not a sum of peaks.

A traced step says what the model's operators allocate and release; the placement's own storages (arenas, gathered
weights, messages) come and go around its segments, as `placement` does it:

    gather -> forward -> free -> gather -> backward -> free, pack, scatter -> ... -> update
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fourfold.ledger.ledger import MEMORY
from fourfold.placement.layout import Layout
from fourfold.planner.recorder import AFTER, BACKWARD, FORWARD, STILL
from fourfold.planner.tape import Segment, Tape

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, BUFFERS, WORKSPACE, OTHER = MEMORY


@dataclass
class Account:
    """Bytes held now, by category, and what was held at the highest moment."""

    now: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MEMORY, 0))
    peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MEMORY, 0))
    level: int = 0
    highest: int = 0
    when: str = "at rest"
    doing: str = "at rest"

    def hold(self, category: str, nbytes: int) -> None:
        """Allocate (or, below zero, release)."""
        self.now[category] += nbytes
        self.level += nbytes
        if self.level > self.highest:
            self.highest, self.peak, self.when = self.level, dict(self.now), self.doing

    def touch(self, category: str, nbytes: int) -> None:
        """Allocate and release at once: a kernel's workspace."""
        if self.level + nbytes > self.highest:
            self.hold(category, nbytes)
            self.hold(category, -nbytes)


@dataclass(frozen=True)
class Parcel:
    """One unit of a placement, in bytes an element: its layout, and where its weights lie in execution order.

    Attributes:
        places: the blocks' numbers in execution order; empty for what lies before or after them.
        master, message, compute: bytes of an element at rest in the shard, on the wire, in compute.
        resident: full weights rest on every rank.
        hold: gradients stay whole until the last micro-batch.
        outer: some of its weights lie before or after the blocks.
        reached: backward comes to one of its blocks.
    """

    layout: Layout
    places: tuple[int, ...]
    master: int
    message: int
    compute: int
    resident: bool
    hold: bool
    outer: bool = False
    reached: bool = True

    @property
    def shared(self) -> bool:
        """Shard and full weights are one storage."""
        return self.resident and self.layout.parts == 1 and self.message == self.master

    @property
    def transient(self) -> bool:
        """Full weights for compute come and go."""
        return not self.resident or self.message != self.compute

    @property
    def at_rest(self) -> int:
        """Bytes of weights between steps."""
        rest = self.layout.full * self.message if self.resident and not self.shared else 0
        return self.layout.size * self.master + rest

    @property
    def full(self) -> int:
        """Bytes of the gathered weights."""
        return self.layout.full * self.compute

    @property
    def staging(self) -> int:
        """Bytes of a gather in flight: the received shards, and what is sent where it has another type."""
        if self.resident:
            return 0
        sent = self.layout.size * self.message if self.message != self.master else 0
        return self.layout.gathered * self.message + sent

    @property
    def packed(self) -> int:
        """Bytes of a gradient message."""
        return self.layout.trained * self.layout.parts * self.message if self.layout.parts > 1 else 0


@dataclass(frozen=True)
class Job:
    """What is simulated.

    Attributes:
        tape: the traced step at this rank's rows of one micro-batch.
        workspace: bytes that each operator of the tape holds beyond what it returns.
        parcels: the placement's units; empty for a plain process without fourfold.
        states: tensors of a weight's size that the optimizer keeps.
        receive: copies of a gradient message that the backend receives into while it sums (gloo and threads: 1).
        extra: bytes of buffers and of the batch.
        sizes: of the mesh's axes.
    """

    tape: Tape
    workspace: Sequence[int]
    parcels: tuple[Parcel, ...]
    states: int
    microbatches: int = 1
    overlap: bool = True
    receive: int = 1
    extra: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)

    def received(self, number: int) -> int:
        """Bytes that the backend receives into while a message of the tape is under way."""
        return self.receive * self.tape.messages[number].received(self.sizes)


def plain(tape: Tape, workspace: Sequence[int], *, states: int, itemsize: int) -> Account:
    """The step of one ordinary process: gradients stay until the update has used them and are then dropped."""
    account = Account()
    numel = sum(_numel(shape) for _, shape, _ in tape.weights)
    trained = sum(_numel(shape) for _, shape, trained in tape.weights if trained)
    account.hold(PARAMETERS, numel * itemsize)
    account.hold(OPTIMIZER, states * trained * itemsize)
    account.hold(OTHER, tape.buffer_bytes + tape.batch_bytes)
    for segment in tape.segments:
        account.doing = doing(tape, segment)
        _play(account, tape, segment, workspace, {})
    return account


def doing(tape: Tape, segment: Segment) -> str:
    """A segment in words."""
    named = tape.blocks[segment.place] if 0 <= segment.place < len(tape.blocks) else None
    return f"{segment.phase} of {named or ('what lies before the blocks' if segment.place < 0 else 'the head')}"


def _numel(shape: Sequence[int]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product


def _play(
    account: Account,
    tape: Tape,
    segment: Segment,
    workspace: Sequence[int],
    gradients: dict[int, int],
    taken: Callable[[int], bool] = lambda place: False,
    received: Callable[[int], int] = lambda message: 0,
) -> None:
    """Let a segment's storages come and go.

    Args:
        gradients: collects, by place, the bytes of finished gradients.
        taken: gradients of this place go to the flat gradient, and away, as soon as they are there; those of weights
            that do not travel always do.
        received: bytes that are received into while a message is under way.
    """
    fresh = 0
    for event in segment.events:
        account.hold(GRADIENTS, -fresh)
        fresh = 0
        if event.kind == "op":
            account.touch(WORKSPACE, workspace[event.number])
            continue
        if event.kind in ("send", "wait"):
            nbytes = received(event.number)
            account.hold(WORKSPACE, nbytes if event.kind == "send" else -nbytes)
            continue
        assert event.key is not None
        storage = tape.storages[event.key]
        category = ACTIVATIONS if storage.gradient_of is None else GRADIENTS
        account.hold(category, storage.nbytes if event.kind == "+" else -storage.nbytes)
        if storage.gradient_of is not None:
            signed = storage.nbytes if event.kind == "+" else -storage.nbytes
            here = storage.gradient_of == segment.place and taken(segment.place)
            if event.kind == "+" and (here or storage.gradient_of == STILL):
                fresh = signed
            else:
                gradients[storage.gradient_of] = gradients.get(storage.gradient_of, 0) + signed
    account.hold(GRADIENTS, -fresh)


class Simulation:
    """One optimizer step of a placed model on one rank."""

    def __init__(self, job: Job):
        self.job = job
        self.account = Account()
        self.live: set[int] = set()
        self.flying: set[int] = set()
        self.departed: set[int] = set()
        self.pending: int = 0
        self.summed = False
        self.home = {place: number for number, parcel in enumerate(job.parcels) for place in parcel.places}
        self.blocks = sorted(self.home)
        self.gradients: dict[int, int] = {}
        self.kept: dict[int, int] = {}

    def run(self) -> Account:
        """Simulate and return the account. Three micro-batches show all that any number of them would."""
        self._rest()
        count = min(self.job.microbatches, 3)
        for number in range(count):
            self.summed = number > 0
            self._microbatch(last=number == count - 1)
        return self.account

    def _rest(self) -> None:
        for parcel in self.job.parcels:
            self.account.hold(PARAMETERS, parcel.at_rest)
            self.account.hold(GRADIENTS, parcel.layout.trained * parcel.master)
            self.account.hold(OPTIMIZER, self.job.states * parcel.layout.trained * parcel.master)
        self.account.hold(OTHER, self.job.extra)

    def _microbatch(self, *, last: bool) -> None:
        outer = [number for number, parcel in enumerate(self.job.parcels) if not parcel.places]
        self.departed, self.gradients = set(), {}
        for number in outer:
            self._start(number)
        if self.blocks and self.job.overlap:
            self._start(self.home[self.blocks[0]])
        for number in outer:
            self._ready(number)
        for segment in self.job.tape.segments:
            self.account.doing = doing(self.job.tape, segment)
            self._enter(segment)
            _play(
                self.account, self.job.tape, segment, self.job.workspace, self.gradients, self._taken, self.job.received
            )
            self._leave(segment, last)
        for number in reversed(range(len(self.job.parcels))):
            self._depart(number, last)
        self._settle()
        for number in list(self.live):
            self._free(number)

    # ---- around a segment

    def _enter(self, segment: Segment) -> None:
        unit = self.home.get(segment.place)
        if unit is None:
            return
        self._ready(unit)
        step = 1 if segment.phase == FORWARD else -1
        ahead = self.home.get(self._neighbour(segment.place, step))
        if self.job.overlap and ahead is not None and ahead != unit and (step > 0 or self.job.parcels[ahead].reached):
            self._start(ahead)

    def _neighbour(self, place: int, step: int) -> int:
        unit = self.job.parcels[self.home[place]]
        return (max(unit.places) if step > 0 else min(unit.places)) + step

    def _leave(self, segment: Segment, last: bool) -> None:
        unit = self.home.get(segment.place)
        if unit is None:
            return
        places = self.job.parcels[unit].places
        if segment.phase == FORWARD and segment.place == max(places) and segment.place != self.blocks[-1]:
            self._free(unit)
        if segment.phase == BACKWARD and segment.place == min(places):
            self._free(unit)
            # What also holds weights before the blocks is not complete yet.
            early = unit + 1 if self._unit(-1) == unit else unit
            for number in range(len(self.job.parcels) - 1, early - 1, -1):
                self._depart(number, last)

    # ---- weights

    def _start(self, unit: int) -> None:
        parcel = self.job.parcels[unit]
        if parcel.resident or unit in self.live:
            return
        self.live.add(unit)
        self.flying.add(unit)
        self.account.hold(BUFFERS, parcel.staging)

    def _ready(self, unit: int) -> None:
        parcel = self.job.parcels[unit]
        if parcel.resident:
            if parcel.transient and unit not in self.live:
                self.live.add(unit)
                self.account.hold(BUFFERS, parcel.full)
            return
        self._start(unit)
        if unit in self.flying:
            self.flying.remove(unit)
            self.account.hold(BUFFERS, parcel.full)
            self.account.hold(BUFFERS, -parcel.staging)

    def _free(self, unit: int) -> None:
        if unit in self.live:
            self._ready(unit)
            self.live.remove(unit)
            self.account.hold(BUFFERS, -self.job.parcels[unit].full)

    # ---- gradients

    def _depart(self, unit: int, last: bool) -> None:
        """Pack a unit's gradients into its message (or flat gradient), drop them, and begin to sum."""
        if unit in self.departed:
            return
        self.departed.add(unit)
        self._settle()
        parcel = self.job.parcels[unit]
        self.account.doing = f"packing the gradients of unit {unit}"
        if parcel.hold and parcel.layout.parts > 1:
            self._accumulate(unit, parcel, last)
        else:
            self.account.hold(BUFFERS, parcel.packed)
            self._drop(unit)
            # A sum that is added to an earlier micro-batch's lies beside it until then.
            beside = parcel.layout.trained * parcel.master if self.summed and parcel.packed else 0
            self._send(parcel.packed * (1 + self.job.receive) + beside)
            self.account.hold(BUFFERS, -parcel.packed)

    def _accumulate(self, unit: int, parcel: Parcel, last: bool) -> None:
        """Level optimizer: whole gradients are added up on every rank until the last micro-batch sends them."""
        whole = parcel.layout.trained * parcel.layout.parts * parcel.master
        if unit not in self.kept and last:
            whole = parcel.packed
        self.account.hold(GRADIENTS, whole)
        self._drop(unit)
        if unit in self.kept:
            self.account.hold(GRADIENTS, -whole)
        else:
            self.kept[unit] = whole
        if last:
            self._send(parcel.packed * (1 + self.job.receive))
            self.account.hold(GRADIENTS, -self.kept.pop(unit))

    def _drop(self, unit: int) -> None:
        for place in [place for place in self.gradients if self._unit(place) == unit]:
            self.account.hold(GRADIENTS, -self.gradients.pop(place))

    def _taken(self, place: int) -> bool:
        """Gradients of this place go to their places in the flat gradient at once: nothing is cut."""
        unit = self._unit(place)
        return unit is not None and self.job.parcels[unit].layout.parts == 1

    def _unit(self, place: int) -> int | None:
        """The unit of a block, or of what lies after (last) or before (first) the blocks; there lie also the weights of
        a block that has no unit of its own."""
        if place in self.home:
            return self.home[place]
        outer = [number for number, parcel in enumerate(self.job.parcels) if parcel.outer]
        return (outer[-1] if place == AFTER else outer[0]) if outer else None

    def _send(self, nbytes: int) -> None:
        self.pending = nbytes
        self.account.hold(BUFFERS, nbytes)
        if not self.job.overlap:
            self._settle()

    def _settle(self) -> None:
        self.account.hold(BUFFERS, -self.pending)
        self.pending = 0
