"""Every collective on thread ranks against what plain indexing says; sums bit for bit in rank order."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from torch import Tensor

from fourfold import wire
from fourfold.wire.codecs import bf16

SIZES = (1, 2, 3, 4)
MOVED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 3
    return (draw > 0) if dtype == torch.bool else draw.abs().to(dtype) if dtype == torch.uint8 else draw.to(dtype)


def in_order(parts: list[Tensor]) -> Tensor:
    return functools.reduce(operator.add, parts)


def on(size: int, body, *args):
    def inside(world: wire.World):
        return body(wire.Mesh(world, {"z": size})["z"], *args)

    return wire.threads.launch(size, inside, timeout=20)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", MOVED)
def test_all_gather(size: int, dtype: torch.dtype) -> None:
    def body(axis: wire.Axis) -> Tensor:
        out = torch.empty(size, 2, 3, dtype=dtype)
        axis.all_gather(out, values(axis.index, 6, dtype), "weight").wait()
        return out

    want = torch.cat([values(rank, 6, dtype) for rank in range(size)])
    assert all(torch.equal(out.flatten(), want) for out in on(size, body))


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_of_a_view_of_its_own_output(size: int) -> None:
    def body(axis: wire.Axis) -> Tensor:
        out = torch.zeros(size * 4)
        out[axis.index * 4 :][:4] = values(axis.index, 4)
        axis.all_gather(out, out[axis.index * 4 :][:4], "weight").wait()
        return out

    assert all(torch.equal(out, torch.cat([values(rank, 4) for rank in range(size)])) for out in on(size, body))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 1, 2, 5, 12, 1001])
def test_all_reduce_is_in_place_and_in_rank_order(size: int, count: int) -> None:
    def body(axis: wire.Axis) -> Tensor:
        tensor = values(axis.index, count)
        axis.all_reduce(tensor, "gradient").wait()
        return tensor

    want = in_order([values(rank, count) for rank in range(size)])
    assert all(torch.equal(out, want) for out in on(size, body))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_sums_are_rounded_once(dtype: torch.dtype) -> None:
    def body(axis: wire.Axis) -> Tensor:
        tensor = values(axis.index, 300, dtype)
        axis.all_reduce(tensor, "gradient").wait()
        return tensor

    want = in_order([values(rank, 300, dtype).float() for rank in range(4)]).to(dtype)
    assert all(torch.equal(out, want) for out in on(4, body))


def test_bits_do_not_depend_on_bucketing() -> None:
    # At two ranks this could not fail: a + b commutes. Facts: 463 of 3,000 floats differ on gloo's own sum at three.
    def body(axis: wire.Axis, cuts: list[int]) -> Tensor:
        tensor = values(axis.index, 3000)
        for work in [axis.all_reduce(bucket, "gradient") for bucket in tensor.split(cuts)]:
            work.wait()
        return tensor

    whole, cut = on(3, body, [3000]), on(3, body, [700, 1, 1299, 1000])
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))
    backwards = in_order([values(rank, 3000) for rank in (2, 1, 0)])
    assert not torch.equal(whole[0], backwards), "the order of a sum of three must show in its bits"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("sent", "summed"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_reduce_scatter_adds_up_in_the_dtype_of_out(size: int, sent: torch.dtype, summed: torch.dtype) -> None:
    def body(axis: wire.Axis) -> Tensor:
        out = torch.empty(7, dtype=summed)
        axis.reduce_scatter(out, values(axis.index, 7 * size, sent), "gradient").wait()
        return out

    want = in_order([values(rank, 7 * size, sent).to(summed) for rank in range(size)])
    assert torch.equal(torch.cat(on(size, body)), want)


UNEVEN = {1: (3,), 2: (0, 4), 3: (2, 5, 1), 4: (3, 0, 1, 2), 5: (1, 1, 2, 0, 6)}


@pytest.mark.parametrize("size", UNEVEN)
@pytest.mark.parametrize("codec", [None, bf16.Codec()])
def test_uneven_all_gather(size: int, codec: bf16.Codec | None) -> None:
    sizes = UNEVEN[size]

    def body(axis: wire.Axis) -> Tensor:
        out = torch.empty(sum(sizes))
        axis.all_gather(out, values(axis.index, sizes[axis.index]), "weight", sizes=sizes, codec=codec).wait()
        return out

    want = torch.cat([values(rank, sizes[rank]) for rank in range(size)])
    if codec is not None and size > 1:
        want = want.bfloat16().float()
    assert all(torch.equal(out, want) for out in on(size, body))


@pytest.mark.parametrize("size", UNEVEN)
@pytest.mark.parametrize(
    ("sent", "summed"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2]
)
def test_uneven_reduce_scatter_is_in_rank_order(size: int, sent: torch.dtype, summed: torch.dtype) -> None:
    sizes = UNEVEN[size]

    def body(axis: wire.Axis) -> Tensor:
        out = torch.empty(sizes[axis.index], dtype=summed)
        axis.reduce_scatter(out, values(axis.index, sum(sizes), sent), "gradient", sizes=sizes).wait()
        return out

    want = in_order([values(rank, sum(sizes), sent).to(summed) for rank in range(size)])
    assert torch.equal(torch.cat(on(size, body)), want)


def test_ranks_that_cut_otherwise_are_named() -> None:
    def body(axis: wire.Axis) -> None:
        sizes = (2, 1, 1) if axis.index < 2 else (1, 2, 1)
        shard = torch.ones(sizes[axis.index])
        axis.all_gather(torch.empty(4), shard, "weight", sizes=sizes).wait()

    with pytest.raises(wire.RankFailed, match=r"rank 2 in all_gather of weight on z, 1\+2\+1 × float32; .* 2\+1\+1"):
        on(3, body)


@pytest.mark.parametrize("size", SIZES)
def test_even_all_to_all(size: int) -> None:
    def body(axis: wire.Axis) -> Tensor:
        out = torch.empty(2 * size)
        axis.all_to_all(out, values(axis.index, 2 * size), "activation").wait()
        return out

    for rank, out in enumerate(on(size, body)):
        assert torch.equal(out, torch.cat([values(peer, 2 * size)[2 * rank : 2 * rank + 2] for peer in range(size)]))


def test_uneven_all_to_all_with_empty_parts() -> None:
    table = [[0, 2, 3], [1, 0, 0], [4, 5, 6]]  # table[i][j]: elements from rank i to rank j

    def body(axis: wire.Axis) -> Tensor:
        ins, outs = table[axis.index], [row[axis.index] for row in table]
        out = torch.empty(sum(outs))
        axis.all_to_all(out, values(axis.index, sum(ins)), "embedding", outs, ins).wait()
        return out

    for rank, out in enumerate(on(3, body)):
        parts = [values(peer, sum(table[peer])).split(table[peer])[rank] for peer in range(3)]
        assert torch.equal(out, torch.cat(parts))


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_from_the_last(size: int) -> None:
    def body(axis: wire.Axis) -> Tensor:
        tensor = values(axis.index, 9)
        axis.broadcast(tensor, size - 1, "weight").wait()
        return tensor

    assert all(torch.equal(out, values(size - 1, 9)) for out in on(size, body))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_reduce_to_the_last_adds_in_rank_order_and_rounds_once(size: int, dtype: torch.dtype) -> None:
    given = [(values(rank, 9) / 7).to(dtype) for rank in range(size)]

    def body(axis: wire.Axis) -> Tensor:
        tensor = given[axis.index].clone()
        axis.reduce(tensor, size - 1, "weight").wait()
        return tensor

    *others, last = on(size, body)
    wider = torch.float32 if dtype == torch.bfloat16 else dtype
    assert torch.equal(last, in_order([one.to(wider) for one in given]).to(dtype))
    assert all(torch.equal(*pair) for pair in zip(others, given[:-1], strict=True))


def test_messages_keep_their_order_within_a_tag_and_tags_do_not_mix() -> None:
    def body(axis: wire.Axis) -> list[float]:
        if axis.index == 0:
            for value, tag in ((1.0, 0), (2.0, 5), (3.0, 0)):
                axis.send(torch.tensor([value]), 1, "activation", tag).wait()
            return []
        found = []
        for tag in (5, 0, 0):
            got = torch.empty(1)
            axis.receive(got, 0, "activation", tag).wait()
            found.append(got.item())
        return found

    assert on(2, body)[1] == [2.0, 1.0, 3.0]


@pytest.mark.parametrize("size", SIZES)
def test_collect_and_barrier(size: int) -> None:
    def body(axis: wire.Axis) -> list[list[float]]:
        axis.barrier()
        return axis.collect([axis.index, 2.0**52 + 1])

    assert on(size, body) == [[[float(rank), 2.0**52 + 1] for rank in range(size)]] * size


def test_what_was_sent_may_change_after_the_wait() -> None:
    def body(axis: wire.Axis) -> Tensor:
        shard, out = values(axis.index, 50), torch.empty(150)
        for _ in range(20):
            axis.all_gather(out, shard, "weight").wait()
            shard += 1
        return out

    want = torch.cat([in_order([values(rank, 50)] + [torch.ones(50)] * 19) for rank in range(3)])
    assert all(torch.equal(out, want) for out in on(3, body))


def test_gradients_do_not_flow_through_and_parameters_may_be_sent() -> None:
    def body(axis: wire.Axis) -> bool:
        weight = torch.nn.Parameter(torch.ones(4))
        out = torch.empty(8)
        axis.all_gather(out, weight, "weight").wait()
        axis.all_reduce(weight, "weight").wait()
        return weight.requires_grad and weight.is_leaf and weight.tolist() == [2.0] * 4 and not out.requires_grad

    assert on(2, body) == [True, True]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda axis: axis.all_reduce(torch.ones(4, 4).t(), "gradient"), "not contiguous"),
        (lambda axis: axis.all_reduce(torch.ones(4), "gradeint"), "did you mean 'gradient'"),
        (lambda axis: axis.all_gather(torch.ones(7), torch.ones(4), "weight"), "expected `out` to have 8 elements"),
        (lambda axis: axis.all_gather(torch.ones(8).double(), torch.ones(4), "weight"), "one dtype"),
        (lambda axis: axis.reduce_scatter(torch.ones(4), torch.ones(9), "gradient"), "expected `full` to have 8"),
        (lambda axis: axis.all_gather(torch.ones(7), torch.ones(4), "weight", sizes=[3, 3]), "add up to the 7"),
        (lambda axis: axis.all_gather(torch.ones(7), torch.ones(4), "weight", sizes=[7]), "`sizes` of 2 counts"),
        (lambda axis: axis.all_gather(torch.ones(7), torch.ones(1), "weight", sizes=[4, 3]), "`shard` has 1"),
        (lambda axis: axis.reduce_scatter(torch.ones(1), torch.ones(9), "weight", sizes=[4, 5]), "`out` has 1; give"),
        (lambda axis: axis.reduce_scatter(torch.ones(1), torch.ones(1), "weight", sizes=[2, -1]), "add up to the 1"),
        (lambda axis: axis.all_to_all(torch.ones(3), torch.ones(3), "activation"), "do not divide by 2 ranks"),
        (lambda axis: axis.all_to_all(torch.ones(3), torch.ones(3), "activation", [1, 1], [1, 2]), "add up to 3"),
        (lambda axis: axis.broadcast(torch.ones(3), 2, "weight"), r"rank of the axis \(0 … 1\), found 2"),
        (lambda axis: axis.send(torch.ones(3), axis.index, "activation"), "this rank itself"),
        (lambda axis: axis.receive(torch.ones(3), 1 - axis.index, "activation", -1), "expected a tag"),
    ],
)
def test_calls_that_cannot_be_are_refused_before_anything_moves(call, says: str) -> None:
    def body(axis: wire.Axis) -> int:
        with pytest.raises(wire.UsageError, match=says):
            call(axis)
        axis.barrier()
        return axis.ledger.sent(kind="control") - axis.ledger.sent()

    assert on(2, body) == [0, 0]
