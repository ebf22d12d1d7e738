"""An order answers *when*: a generator of actions over a shape. One file a schedule, no torch in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from fourfold.schedule.action import Action, ScheduleError


@dataclass(frozen=True)
class Shape:
    """What a schedule is laid over.

    Attributes:
        stages: consecutive parts of the model; each runs forward and backward once a micro-batch.
        microbatches: parts of one optimizer step's batch.
        workers: members of the pipeline.
        chunks: stages a worker holds, where an order deals several to each.
    """

    stages: int = 1
    microbatches: int = 1
    workers: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ScheduleError(
                    f"{entry.name} of a schedule: expected a whole number of at least 1, found {value!r}"
                )


@dataclass(frozen=True)
class Microbatches:
    """What the options of every order have.

    Attributes:
        microbatches: parts into which the rows of one optimizer step are cut.
    """

    microbatches: int = 1

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.type == "int" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{entry.name}: expected a whole number of at least 1, found {value!r}")


@dataclass(frozen=True)
class Pipelined(Microbatches):
    """What the options of orders over several workers have.

    Attributes:
        ready: a worker runs the best of what is ready (`ready.py`), and the order is only its ranking; else the order
            is kept.
        in_flight: micro-batches that each worker may have in flight where it does not keep to the order; None: as many
            as the order has.
    """

    ready: bool = field(default=False, kw_only=True)
    in_flight: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.ready, bool):
            raise ValueError(f"ready: expected true or false, found {self.ready!r}")
        count = self.in_flight
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ValueError(f"in_flight: expected a whole number of at least 1, found {count!r}")
        if count is not None and not self.ready:
            raise ValueError(f"in_flight: is for ready: true, found {count} with the order kept; leave it out")


def chunks_of(options: object) -> int:
    """How many stages a worker holds under an order's options: their `chunks`, or one."""
    return getattr(options, "chunks", 1)


class Order(Protocol):
    """What a schedule's file offers under the name `order`, beside its dataclass `Options`."""

    def __call__(self, shape: Shape, options: Any) -> Iterator[Action]:
        """Yield every action of one optimizer step, each worker's in the sequence in which it shall run them."""
        ...
