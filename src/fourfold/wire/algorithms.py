"""The collectives as wire runs them, on the few transfers that a backend offers.

Sums are taken in rank order, 0 first, so their bits depend neither on bucketing nor on who comes first. Backends'
own reduce-scatters may not do that, and gloo's moves twice the bytes of the formula: an exchange and a local sum does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.plan.protocols import Codec
from fourfold.wire.backends.channel import Channel
from fourfold.wire.formulas import shares
from fourfold.wire.work import Steps


def all_gather(
    channel: Channel,
    out: Tensor,
    shard: Tensor,
    signature: str,
    codec: Codec | None,
    sizes: Sequence[int] | None = None,
) -> Steps:
    """out = every rank's shard, in rank order: of `sizes[rank]` elements, equally many if None."""
    slot = channel.reserve(signature)
    splits = [shard.numel()] * channel.size if sizes is None else sizes
    if codec is None:
        yield channel.all_gather(slot, out, shard, splits)
        return
    payload = codec.encode(shard)
    coded = [codec.wire_bytes(n, shard.element_size()) // payload.element_size() for n in splits]
    payloads = payload.new_empty(sum(coded))
    yield channel.all_gather(slot, payloads, payload, coded)
    _decode(codec, payloads, splits, out)


def reduce_scatter(
    channel: Channel,
    out: Tensor,
    full: Tensor,
    signature: str,
    codec: Codec | None,
    sizes: Sequence[int] | None = None,
) -> Steps:
    """out = the sum over ranks of their parts of `full` for this rank, added up in out's dtype.

    The part for a rank has `sizes[rank]` elements, equally many if None. Backends' own reduce-scatters know equal parts
    only; an exchange does not mind.
    """
    slot = channel.reserve(signature)
    if sizes is None and codec is None and channel.native_reduce_scatter and out.dtype == full.dtype:
        yield channel.reduce_scatter(slot, out, full)
        return
    mine = [out.numel()] * channel.size
    # A buffer kept from call to call took 10 % less CPU at 7 MB and 5 % (within the noise) at 0.8 MB on two gloo ranks.
    # It would lie there through the whole backward, where memory is highest.
    received = full.new_empty(out.numel() * channel.size)
    yield from _exchange(channel, slot, received, full, mine, mine if sizes is None else sizes, codec)
    sum_in_order(out, received.view(channel.size, -1))


def all_reduce(channel: Channel, tensor: Tensor, signature: str, codec: Codec | None) -> Steps:
    """In place: an exchange of parts, a sum in rank order, a gather of the sums. Uneven parts where it must be."""
    if codec is None and channel.native_all_reduce:
        yield channel.all_reduce(channel.reserve(signature), tensor)
        return
    exchange, gather = channel.reserve(signature), channel.reserve(signature)
    splits = shares(tensor.numel(), channel.size)
    mine = tensor.split(splits)[channel.index]
    received = tensor.new_empty(mine.numel() * channel.size)
    yield from _exchange(channel, exchange, received, tensor, [mine.numel()] * channel.size, splits, codec)
    parts = received.view(channel.size, -1)
    _sum_once(mine, parts)
    if codec is None:
        yield channel.all_gather(gather, tensor, mine, splits, later=True)
        return
    payload = codec.encode(mine)
    sizes = [codec.wire_bytes(n, tensor.element_size()) // payload.element_size() for n in splits]
    payloads = payload.new_empty(sum(sizes))
    yield channel.all_gather(gather, payloads, payload, sizes, later=True)
    _decode(codec, payloads, splits, tensor)


def all_to_all(
    channel: Channel,
    out: Tensor,
    inp: Tensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    signature: str,
    codec: Codec | None,
) -> Steps:
    """Part j of `inp` goes to rank j; part i of `out` comes from rank i. Splits are in elements."""
    yield from _exchange(channel, channel.reserve(signature), out, inp, out_splits, in_splits, codec)


def broadcast(channel: Channel, tensor: Tensor, source: int, signature: str, codec: Codec | None) -> Steps:
    """Every rank's `tensor` becomes the source's; with a codec, the source's too becomes what the others decode."""
    slot = channel.reserve(signature)
    if codec is None:
        yield channel.broadcast(slot, tensor, source)
        return
    payload = codec.encode(tensor)
    yield channel.broadcast(slot, payload, source)
    _decode(codec, payload, [tensor.numel()], tensor)


def reduce(channel: Channel, tensor: Tensor, to: int, signature: str, codec: Codec | None) -> Steps:
    """Rank `to`'s tensor becomes the sum over the ranks: an exchange in which only that rank receives."""
    slot, root = channel.reserve(signature), channel.index == to
    gives, takes = [0] * channel.size, [tensor.numel() if root else 0] * channel.size
    gives[to] = tensor.numel()
    received = tensor.new_empty(sum(takes))
    yield from _exchange(channel, slot, received, tensor, takes, gives, codec)
    if root:
        _sum_once(tensor, received.view(channel.size, -1))


def send(channel: Channel, tensor: Tensor, to: int, tag: int, codec: Codec | None) -> Steps:
    """`tensor` to one rank."""
    yield channel.send(tensor if codec is None else codec.encode(tensor), to, tag)


def receive(channel: Channel, tensor: Tensor, source: int, tag: int, codec: Codec | None) -> Steps:
    """`tensor` from one rank."""
    if codec is None:
        yield channel.receive(tensor, source, tag)
        return
    form = codec.encode(tensor.new_empty(0))
    payload = form.new_empty(codec.wire_bytes(tensor.numel(), tensor.element_size()) // form.element_size())
    yield channel.receive(payload, source, tag)
    _decode(codec, payload, [tensor.numel()], tensor)


def sum_in_order(out: Tensor, parts: Tensor) -> Tensor:
    """out = parts[0] + parts[1] + …, from the left, in out's dtype; returns out. `parts`: (ranks, n)."""
    first, *rest = parts.unbind()
    if rest and parts.dtype == out.dtype:
        torch.add(first, rest.pop(0), out=out)
    else:
        out.copy_(first)
    for part in rest:
        out.add_(part)
    return out


def _sum_once(out: Tensor, parts: Tensor) -> None:
    """out = the sum of the parts in rank order; 16-bit floats are added up in float32 and rounded once."""
    if out.dtype in (torch.bfloat16, torch.float16):
        out.copy_(sum_in_order(torch.empty_like(out, dtype=torch.float32), parts))
    else:
        sum_in_order(out, parts)


def _exchange(
    channel: Channel,
    slot: int,
    out: Tensor,
    inp: Tensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    codec: Codec | None,
) -> Steps:
    if codec is None:
        yield channel.all_to_all(slot, out, inp, out_splits, in_splits)
        return
    payloads = [codec.encode(part) for part in inp.split(list(in_splits))]
    itemsize = payloads[0].element_size()
    sizes = [codec.wire_bytes(n, inp.element_size()) // itemsize for n in out_splits]
    received = payloads[0].new_empty(sum(sizes))
    yield channel.all_to_all(slot, received, torch.cat(payloads), sizes, [one.numel() for one in payloads])
    _decode(codec, received, out_splits, out)


def _decode(codec: Codec, payloads: Tensor, splits: Sequence[int], out: Tensor) -> None:
    itemsize = payloads.element_size()
    sizes = [codec.wire_bytes(n, out.element_size()) // itemsize for n in splits]
    for payload, part in zip(payloads.split(sizes), out.split(list(splits)), strict=True):
        part.copy_(codec.decode(payload, part.numel(), part.dtype))
