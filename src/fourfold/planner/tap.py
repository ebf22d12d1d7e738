"""What a rank of a grid says to the others, message by message: a dry mesh that tells a recorder of all of them.

A ledger adds bytes up. A forecast wants every message at its place in time, and when the model waits for it; and of
what is summed the elements: they are affine in the rows of a batch, the bytes that a rank sends of them are not where
they do not divide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fourfold.ledger import Ledger
from fourfold.wire import Mesh, World, formulas
from fourfold.wire.dry import DryChannel, DryFabric
from fourfold.wire.work import Pending, Steps


class Message(NamedTuple):
    """One collective that the first rank takes part in.

    Attributes:
        axis: "x", a product ("x+y") or a part ("y/4").
        kind, op: as the ledger calls them.
        amount: elements that are summed or broadcast; of other collectives bytes that the rank sends.
        itemsize: bytes of an element that is summed or broadcast; of other collectives 1.
        to: of a sum to one rank: which of the group.
    """

    axis: str
    kind: str
    op: str
    amount: int
    itemsize: int
    to: int = 0

    def sent(self, sizes: Mapping[str, int]) -> int:
        """Bytes that the first rank hands to the network."""
        size, nbytes = span(self.axis, sizes)[0], self.amount * self.itemsize
        if self.op == "all_reduce":
            return formulas.all_reduce(size, nbytes, self.itemsize, 0)
        if self.op == "broadcast":
            return formulas.broadcast(size, nbytes, 0)
        if self.op == "reduce":
            return formulas.reduce(size, nbytes, 0, self.to)
        return self.amount

    def whole(self, sizes: Mapping[str, int]) -> int:
        """Bytes of the whole tensor of one group, rounded."""
        if self.op in SEEN:
            return self.amount * self.itemsize
        size = span(self.axis, sizes)[0]
        return round(self.amount * size / max(1, size - 1))

    def received(self, sizes: Mapping[str, int]) -> int:
        """Bytes that a backend without sums of its own receives into, beside the tensors that it is given."""
        if self.op == "reduce":
            return 0 if self.to else span(self.axis, sizes)[0] * self.whole(sizes)
        return self.whole(sizes) if self.op in ("all_reduce", "reduce_scatter") else 0


SEEN = ("all_reduce", "broadcast", "reduce")
"""Collectives whose tensors are seen. A rank sends of them by its place, maybe nothing."""


def span(axis: str, sizes: Mapping[str, int]) -> tuple[int, int]:
    """(ranks of a group, ranks between neighbours of a group) of an axis, a product of axes or a part of one.

    Args:
        sizes: of the mesh's axes, fastest first.
    """
    title, _, part = axis.partition("/")
    names, order = title.split("+"), list(sizes)
    stride = prod(sizes[name] for name in order[: order.index(names[0])])
    return int(part) if part else prod(sizes[name] for name in names), stride


class Listener(Protocol):
    """Who is told.

    Attributes:
        deaf: what is computed just now only makes up what others would have sent.
    """

    deaf: bool

    def send(self, message: Message) -> int:
        """A collective is issued; returns its number."""
        ...

    def amend(self, number: int, message: Message) -> None:
        """It is this one."""
        ...

    def wait(self, number: int) -> None:
        """The model waits for it."""
        ...


def tapped(sizes: Mapping[str, int], listener: Listener) -> Mesh:
    """A dry mesh of these sizes, as its first rank sees it."""
    tap = _Tap(listener)
    world = World(0, prod(sizes.values()), "dry", torch.device("cpu"), fabric=_Fabric(tap))
    return Mesh(world, sizes, tap)


class _Tap(Ledger):
    """A ledger that counts nothing, and hands on what it hears of."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self.listener = listener
        self.message, self.number = Message("", "", "", 0, 1), -1

    def send(self, axis: str, kind: str, op: str, nbytes: int, calls: int = 1) -> None:
        self.message = Message(axis, kind, op, nbytes, 1)
        self.number = self.listener.send(self.message)

    def seen(self, tensor: Tensor, to: int = 0) -> None:
        """The last message is of this tensor."""
        self.message = self.message._replace(amount=tensor.numel(), itemsize=tensor.element_size(), to=to)
        self.listener.amend(self.number, self.message)


class _Fabric(DryFabric):
    def __init__(self, tap: _Tap) -> None:
        super().__init__(rank=0)
        self.tap = tap

    def channel(self, name: str, members: Sequence[int], ordered: bool) -> DryChannel:
        return _Channel(len(members), members.index(self.rank), self.tap)


class _Channel(DryChannel):
    def __init__(self, size: int, index: int, tap: _Tap) -> None:
        super().__init__(size, index)
        self.tap = tap

    def all_reduce(self, slot: int, tensor: Tensor) -> Pending:
        self.tap.seen(tensor)
        return super().all_reduce(slot, tensor)

    def broadcast(self, slot: int, tensor: Tensor, source: int) -> Pending:
        self.tap.seen(tensor)
        return super().broadcast(slot, tensor, source)

    def all_to_all(
        self, slot: int, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Pending:
        if self.tap.message.op == "reduce":
            self.tap.seen(inp, next((rank for rank, count in enumerate(in_splits) if count), 0))
        return super().all_to_all(slot, out, inp, out_splits, in_splits)

    def driven(self, steps: Steps) -> Steps:
        """The results are there at once; that somebody waits for them is noted all the same."""
        self.tap.listener.deaf = True
        try:
            yield from super().driven(steps)
        finally:
            self.tap.listener.deaf = False
        yield _UnderWay(self.tap.listener, self.tap.number)


class _UnderWay:
    def __init__(self, listener: Listener, number: int) -> None:
        self.listener, self.number = listener, number

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self.listener.wait(self.number)
