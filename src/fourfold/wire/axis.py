"""One axis of the mesh: the collectives among its ranks, checked, metered, watched."""

from __future__ import annotations

import itertools
import time
import weakref
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.ledger import Ledger
from fourfold.plan.protocols import Codec
from fourfold.torch_private import storage_key
from fourfold.wire import algorithms, arguments, formulas
from fourfold.wire.backends.channel import Channel
from fourfold.wire.errors import UsageError, WireError
from fourfold.wire.work import Steps, Work
from fourfold.wire.world import World

_numbers = itertools.count()
_axes: weakref.WeakValueDictionary[str, Axis] = weakref.WeakValueDictionary()
"""Axes by key, for registered ops, which can hold strings only. Weak: an axis lives as long as its mesh."""

DIGEST_BITS = 52
"""A digest fits a float64 exactly, so that `collect` can compare digests."""


class Axis:
    """The ranks along one axis (or a product of axes) as one of them sees it.

    Every call returns at once with a `Work`; the tensors belong to it until `work.wait()` has returned. Issue
    collectives in the same order on every rank of the axis. Works of one round may be waited for in any order; an
    all-reduce among more than two ranks has two, and its second starts on a rank only when that rank waits or
    advances: wait for all-reduces in the order in which they were issued, or two ranks may wait for each other. (So
    do `sync` and `placement`, whose gathers and scatters have one round.) Tensors are contiguous; shapes do not
    matter, only the number of elements does. `kind` says what the bytes are for (`ledger.KINDS`); `codec` in which form
    they cross. On an axis of one rank every call is an immediate copy, takes no codec and counts nothing.
    `sizes`, of gathers and scatters, are the elements of each rank's part, equal on every rank; None: equal parts.

    Attributes:
        name: "z", or "z+data" for a product.
        size, index: how many ranks, and which of them this is.
        members: their ranks in the world, in order.
        key: unique in this process; `wire.ops` takes it.
        dry: nothing moves and nobody waits (`wire.dry`); bytes are counted all the same.
        calls: collectives issued so far.
        ledger: where bytes and spans are recorded.
    """

    def __init__(
        self, world: World, name: str, members: Sequence[int], ledger: Ledger, channel: Channel | None
    ) -> None:
        self.world, self.name, self.members, self.ledger = world, name, members, ledger
        self.size, self.index = len(self.members), self.members.index(world.rank)
        self.key = f"{name}@{next(_numbers)}"
        self.calls = 0
        self.dry = world.backend == "dry"
        self._channel, self._digest = channel, 0
        self._under_way: set[Work] = set()
        self._signatures: dict[str, int] = {}
        _axes[self.key] = self

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, rank {self.index} of {self.size})"

    # ---- collectives

    def all_reduce(self, tensor: Tensor, kind: str, *, codec: Codec | None = None) -> Work:
        """Sum `tensor` over the ranks, in place, in rank order: the bits do not depend on bucketing.

        16-bit floats are added up in float32 and rounded once.
        """
        flat = arguments.flat(tensor, "tensor")
        if self._channel is None:
            return self._alone("all_reduce", kind)
        if codec is None:
            sent = formulas.all_reduce(self.size, flat.nbytes, flat.element_size(), self.index)
        else:
            parts = [_wired(codec, count, flat) for count in formulas.shares(flat.numel(), self.size)]
            sent = formulas.all_reduce_of_parts(parts, self.index)
        signature = self._sign("all_reduce", kind, flat, flat.numel(), _form(codec))
        # A dry sum is the tensor as it is; its two rounds would mix it with parts that were never there.
        steps = algorithms.all_reduce(self._channel, flat, signature, None if self.dry else codec)
        composed = codec is not None or not self._channel.native_all_reduce
        return self._issue("all_reduce", kind, sent, steps, rounds=2 if composed else 1)

    def all_gather(
        self,
        out: Tensor,
        shard: Tensor,
        kind: str,
        *,
        sizes: Sequence[int] | None = None,
        codec: Codec | None = None,
    ) -> Work:
        """`out` = every rank's `shard`, in rank order. `shard` may be its own part of `out`.

        Bytes: `formulas.all_gather`, with `sizes` `all_gather_of_parts`; padding never crosses.
        """
        out, shard = arguments.flat(out, "out"), arguments.flat(shard, "shard")
        arguments.same_dtype("all_gather", out, shard)
        if sizes is None:
            arguments.elements(self, "all_gather", "out", out, shard.numel() * self.size)
            sent = formulas.all_gather(self.size, _wired(codec, shard.numel(), shard) * self.size)
        else:
            arguments.parts(self, "all_gather", "out", out, "shard", shard, sizes)
            sent = formulas.all_gather_of_parts([_wired(codec, n, shard) for n in sizes], self.index)
        if self._channel is None:
            _copy(out, shard)
            return self._alone("all_gather", kind)
        signature = self._sign("all_gather", kind, shard, shard.numel(), _form(codec), sizes)
        steps = algorithms.all_gather(self._channel, out, shard, signature, codec, sizes)
        return self._issue("all_gather", kind, sent, steps)

    def reduce_scatter(
        self,
        out: Tensor,
        full: Tensor,
        kind: str,
        *,
        sizes: Sequence[int] | None = None,
        codec: Codec | None = None,
    ) -> Work:
        """`out` = the sum over ranks, in rank order and in out's dtype, of part `index` of `full`.

        Bytes: `formulas.reduce_scatter`, with `sizes` `reduce_scatter_of_parts`; padding never crosses.
        """
        out, full = arguments.flat(out, "out"), arguments.flat(full, "full")
        if sizes is None:
            arguments.elements(self, "reduce_scatter", "full", full, out.numel() * self.size)
            sent = formulas.reduce_scatter(self.size, _wired(codec, out.numel(), full) * self.size)
        else:
            arguments.parts(self, "reduce_scatter", "full", full, "out", out, sizes)
            sent = formulas.reduce_scatter_of_parts([_wired(codec, n, full) for n in sizes], self.index)
        if self._channel is None:
            _copy(out, full)
            return self._alone("reduce_scatter", kind)
        signature = self._sign("reduce_scatter", kind, full, out.numel(), _form(codec), sizes)
        steps = algorithms.reduce_scatter(self._channel, out, full, signature, codec, sizes)
        return self._issue("reduce_scatter", kind, sent, steps)

    def all_to_all(
        self,
        out: Tensor,
        inp: Tensor,
        kind: str,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        *,
        codec: Codec | None = None,
    ) -> Work:
        """Part j of `inp` goes to rank j, part i of `out` comes from rank i. Splits are in elements; even if None."""
        out, inp = arguments.flat(out, "out"), arguments.flat(inp, "inp")
        arguments.same_dtype("all_to_all", out, inp)
        outs = arguments.splits(self, "all_to_all", "out", out, out_splits)
        ins = arguments.splits(self, "all_to_all", "in", inp, in_splits)
        if self._channel is None:
            arguments.elements(self, "all_to_all", "out", out, inp.numel())
            _copy(out, inp)
            return self._alone("all_to_all", kind)
        sent = formulas.all_to_all([_wired(codec, n, inp) for n in ins], self.index)
        even = out_splits is None and in_splits is None
        signature = self._sign("all_to_all", kind, inp, inp.numel() if even else None, _form(codec))
        steps = algorithms.all_to_all(self._channel, out, inp, outs, ins, signature, codec)
        return self._issue("all_to_all", kind, sent, steps)

    def broadcast(self, tensor: Tensor, source: int, kind: str, *, codec: Codec | None = None) -> Work:
        """Every rank's `tensor` becomes that of rank `source` of this axis."""
        flat = arguments.flat(tensor, "tensor")
        arguments.member(self, "broadcast", "source", source)
        if self._channel is None:
            return self._alone("broadcast", kind)
        sent = formulas.broadcast(self.size, _wired(codec, flat.numel(), flat), self.index)
        signature = self._sign("broadcast", kind, flat, flat.numel(), f"{_form(codec)} from {source}")
        return self._issue("broadcast", kind, sent, algorithms.broadcast(self._channel, flat, source, signature, codec))

    def reduce(self, tensor: Tensor, to: int, kind: str, *, codec: Codec | None = None) -> Work:
        """Rank `to`'s tensor becomes the sum over the ranks, in rank order; those of the others stay.

        Every other rank sends its own to `to`. 16-bit floats are added up in float32 and rounded once.
        """
        flat = arguments.flat(tensor, "tensor")
        arguments.member(self, "reduce", "to", to)
        if self._channel is None:
            return self._alone("reduce", kind)
        sent = formulas.reduce(self.size, _wired(codec, flat.numel(), flat), self.index, to)
        signature = self._sign("reduce", kind, flat, flat.numel(), f"{_form(codec)} to {to}")
        return self._issue("reduce", kind, sent, algorithms.reduce(self._channel, flat, to, signature, codec))

    def send(self, tensor: Tensor, to: int, kind: str, tag: int = 0, *, codec: Codec | None = None) -> Work:
        """`tensor` to rank `to` of this axis. Messages of one pair and tag arrive in the order sent."""
        flat = arguments.flat(tensor, "tensor")
        arguments.peer(self, "send", "to", to, tag)
        assert self._channel is not None
        sent = formulas.send(_wired(codec, flat.numel(), flat))
        return self._issue("send", kind, sent, algorithms.send(self._channel, flat, to, tag, codec))

    def receive(self, tensor: Tensor, source: int, kind: str, tag: int = 0, *, codec: Codec | None = None) -> Work:
        """Fill `tensor` from rank `source` of this axis. Counts nothing: the sender did."""
        flat = arguments.flat(tensor, "tensor")
        arguments.peer(self, "receive", "source", source, tag)
        assert self._channel is not None
        return self._issue("receive", kind, 0, algorithms.receive(self._channel, flat, source, tag, codec))

    # ---- control

    def barrier(self) -> None:
        """Return when every rank of the axis has come here."""
        if self._channel is None:
            return
        mark = torch.zeros(self.size, dtype=torch.uint8, device=self.world.device)
        signature = self._sign("barrier", "control", mark, 1)
        steps = algorithms.all_gather(self._channel, mark, mark.new_zeros(1), signature, None)
        self._issue("barrier", "control", formulas.barrier(self.size), steps).wait()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)

    def collect(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's few numbers (equally many on each), in rank order."""
        mine = torch.tensor(list(values), dtype=torch.float64, device=self.world.device)
        every = mine.new_empty(self.size, len(mine))
        self.all_gather(every, mine, "control").wait()
        return every.tolist()

    def digest(self) -> int:
        """A running hash of every collective issued here (op, axis, kind, dtype, size): equal on all its ranks.

        Messages between two ranks, and the splits of uneven exchanges, differ by rank and are left out.
        """
        return self._digest

    def advance(self) -> None:
        """Let every collective under way run the rounds that need not block."""
        for work in list(self._under_way):
            work.advance()

    @property
    def under_way(self) -> int:
        """Collectives issued and not yet waited for."""
        return len(self._under_way)

    # ---- what a work tells its axis

    def waiting(self, work: Work) -> None:
        """The caller blocks in `work`."""
        if self.world.watch is not None:
            self.world.watch.enter(self.ledger.step, self.name, work.op, work.number)

    def resumed(self, work: Work) -> None:
        """The caller goes on; `work` has another round."""
        if self.world.watch is not None:
            self.world.watch.leave(self.ledger.step, self.name, work.op, work.number)

    def finished(self, work: Work) -> None:
        """Results are in place."""
        self._under_way.discard(work)
        if self.world.watch is not None:
            self.world.watch.leave(self.ledger.step, self.name, work.op, work.number)
        if self.ledger.recording:
            end = time.perf_counter_ns()
            self.ledger.span(
                f"wire:{self.name}",
                work.op,
                work.issued,
                end,
                kind=work.kind,
                bytes=work.bytes,
                exposed=work.exposed,
            )

    def failed(self, work: Work, error: Exception) -> Exception:
        """What to raise in place of a backend's error."""
        self._under_way.discard(work)
        return self.failure(f"{work.op} {work.number}", error)

    # ---- for what wire builds on an axis

    @property
    def channel(self) -> Channel:
        """The backend's transfers among these ranks.

        Raises:
            UsageError: the axis has one rank, so that there is nobody to talk to.
        """
        if self._channel is None:
            raise UsageError(f"axis {self.name} has one rank: there is nobody to talk to; keep the tensor instead")
        return self._channel

    def count(self, op: str, kind: str, nbytes: int) -> int:
        """Tell ledger and watch of a call that hands `nbytes` over; returns the call's number."""
        arguments.kind(kind)
        self.calls += 1
        self.ledger.send(self.name, kind, op, nbytes)
        if self.world.watch is not None:
            self.world.watch.issue(self.ledger.step, self.name, op, self.calls)
        return self.calls

    def failure(self, what: str, error: Exception) -> Exception:
        """The error that says who failed in what: the backend's own, if it is wire's, else one made of it."""
        where = f"{what} on axis {self.name} (ranks {', '.join(map(str, self.members))})"
        reason = str(error) or type(error).__name__
        missing = ""
        if self.world.watch is not None:
            missing = self.world.watch.describe_missing(self.members)
        message = f"rank {self.world.rank}, step {self.ledger.step}: {where} failed: {reason}{missing}"
        if isinstance(error, WireError):
            error.args = (message,)
            return error
        return WireError(message)

    # ---- inside

    def _issue(self, op: str, kind: str, nbytes: int, steps: Steps, rounds: int = 1) -> Work:
        number = self.count(op, kind, nbytes)
        driven = self.channel.driven(steps)
        work = Work(op, kind, nbytes, number, driven, self, rounds if driven is steps else 1)
        if not work.done:
            self._under_way.add(work)
        return work

    def _alone(self, op: str, kind: str) -> Work:
        arguments.kind(kind)
        return Work.complete(op, kind)

    def _sign(
        self,
        op: str,
        kind: str,
        tensor: Tensor,
        numel: int | None,
        more: str = "",
        sizes: Sequence[int] | None = None,
    ) -> str:
        """What this rank says that it is doing; also moves the digest on."""
        size = "uneven" if numel is None else numel if sizes is None else "+".join(map(str, sizes))
        signature = f"{op} of {kind} on {self.name}, {size} × {str(tensor.dtype).removeprefix('torch.')}{more}"
        mark = self._signatures.get(signature)
        if mark is None:
            mark = self._signatures[signature] = zlib.crc32(signature.encode())
        self._digest = (self._digest * 1_000_003 + mark + 1) & ((1 << DIGEST_BITS) - 1)
        return signature


def axis_of(key: str) -> Axis:
    """The axis with this key.

    Raises:
        UsageError: no such axis is alive.
    """
    axis = _axes.get(key)
    if axis is None:
        raise UsageError(f"no axis has the key {key!r}: pass `axis.key`, and keep its mesh alive")
    return axis


def _copy(out: Tensor, inp: Tensor) -> None:
    same = storage_key(out) == storage_key(inp) and out.storage_offset() == inp.storage_offset()
    if not same or out.dtype != inp.dtype:
        out.copy_(inp)


def _form(codec: Codec | None) -> str:
    return "" if codec is None else f" as {type(codec).__module__.rpartition('.')[2]}"


def _wired(codec: Codec | None, numel: int, tensor: Tensor) -> int:
    """Bytes that `numel` elements of this tensor become on the wire."""
    itemsize = tensor.element_size()
    return numel * itemsize if codec is None else codec.wire_bytes(numel, itemsize)
