"""What is metered equals the closed forms, exactly, for every collective, size, dtype and codec; and the digest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold import wire
from fourfold.ledger import Flow, Ledger
from fourfold.wire import formulas
from fourfold.wire.codecs import bf16


@settings(deadline=None, max_examples=25)
@given(
    size=st.integers(1, 4),
    count=st.integers(0, 50),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    coded=st.booleans(),
    table=st.lists(st.integers(0, 9), min_size=16, max_size=16),
)
def test_metered_equals_the_formulas(size: int, count: int, dtype: torch.dtype, coded: bool, table: list[int]) -> None:
    codec = bf16.Codec() if coded else None
    itemsize = 2 if coded else torch.empty(0, dtype=dtype).element_size()

    def body(world: wire.World) -> Ledger:
        axis = wire.Mesh(world, {"data": size})["data"]
        part, whole = torch.ones(count, dtype=dtype), torch.ones(count * size, dtype=dtype)
        ins = table[axis.index * 4 :][:size]
        outs = table[axis.index :: 4][:size]
        axis.all_reduce(part, "gradient", codec=codec).wait()
        axis.all_gather(whole, part, "weight", codec=codec).wait()
        axis.reduce_scatter(part, whole, "gradient", codec=codec).wait()
        axis.broadcast(part, 0, "weight", codec=codec).wait()
        axis.reduce(part, size - 1, "weight", codec=codec).wait()
        if size > 1:
            out, inp = torch.empty(sum(outs), dtype=dtype), torch.ones(sum(ins), dtype=dtype)
            axis.all_to_all(out, inp, "embedding", outs, ins, codec=codec).wait()
            sending = axis.send(part, (axis.index + 1) % size, "activation", codec=codec)
            axis.receive(part.clone(), (axis.index - 1) % size, "activation", codec=codec).wait()
            sending.wait()
        axis.barrier()
        return axis.ledger

    for index, ledger in enumerate(wire.threads.launch(size, body)):
        metered = {key: one.bytes for key, one in ledger.traffic().items()}
        if size == 1:
            assert metered == {}
            continue
        ins = [n * itemsize for n in table[index * 4 :][:size]]
        assert metered == {
            Flow("data", "gradient", "all_reduce"): formulas.all_reduce(size, count * itemsize, itemsize, index),
            Flow("data", "weight", "all_gather"): formulas.all_gather(size, count * size * itemsize),
            Flow("data", "gradient", "reduce_scatter"): formulas.reduce_scatter(size, count * size * itemsize),
            Flow("data", "weight", "broadcast"): formulas.broadcast(size, count * itemsize, index),
            Flow("data", "weight", "reduce"): formulas.reduce(size, count * itemsize, index, size - 1),
            Flow("data", "embedding", "all_to_all"): formulas.all_to_all(ins, index),
            Flow("data", "activation", "send"): formulas.send(count * itemsize),
            Flow("data", "activation", "receive"): 0,
            Flow("data", "control", "barrier"): formulas.barrier(size),
        }


@settings(deadline=None, max_examples=20)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=2, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    coded=st.booleans(),
)
def test_uneven_parts_move_no_padding(sizes: list[int], dtype: torch.dtype, coded: bool) -> None:
    codec = bf16.Codec() if coded else None
    itemsize = 2 if coded else torch.empty(0, dtype=dtype).element_size()

    def body(world: wire.World) -> tuple[Ledger, int]:
        mesh = wire.Mesh(world, {"y": len(sizes)})
        axis = mesh["y"]
        part, whole = torch.ones(sizes[axis.index], dtype=dtype), torch.ones(sum(sizes), dtype=dtype)
        axis.all_gather(whole, part, "weight", sizes=sizes, codec=codec).wait()
        axis.reduce_scatter(part, whole, "gradient", sizes=sizes, codec=codec).wait()
        return axis.ledger, mesh.digest()

    parts = [n * itemsize for n in sizes]
    results = wire.threads.launch(len(sizes), body)
    for index, (ledger, _) in enumerate(results):
        assert {key: one.bytes for key, one in ledger.traffic().items()} == {
            Flow("y", "weight", "all_gather"): formulas.all_gather_of_parts(parts, index),
            Flow("y", "gradient", "reduce_scatter"): formulas.reduce_scatter_of_parts(parts, index),
        }
    assert len({digest for _, digest in results}) == 1
    assert sum(ledger.sent(kind="weight") for ledger, _ in results) == (len(sizes) - 1) * sum(parts)
    assert sum(ledger.sent(kind="gradient") for ledger, _ in results) == (len(sizes) - 1) * sum(parts)


def test_a_step_is_counted_on_its_own_and_a_product_under_its_own_name() -> None:
    def body(world: wire.World) -> Ledger:
        ledger = Ledger(rank=world.rank)
        mesh = wire.Mesh(world, {"z": 2, "data": 2}, ledger)
        mesh["z"].all_reduce(torch.ones(4), "gradient").wait()
        ledger.begin(1)
        mesh.over("z", "data").all_reduce(torch.ones(4), "gradient").wait()
        return ledger

    for ledger in wire.threads.launch(4, body):
        assert {key.axis: one.bytes for key, one in ledger.traffic(0).items()} == {"z": 16}
        assert {key.axis: one.bytes for key, one in ledger.traffic(1).items()} == {"z+data": 24}


def test_spans_tell_how_long_a_collective_was_under_way_and_how_long_it_was_waited_for() -> None:
    def body(world: wire.World) -> Ledger:
        ledger = Ledger(recording=True)
        axis = wire.Mesh(world, {"z": 2}, ledger)["z"]
        work = axis.all_reduce(torch.ones(4), "gradient")
        axis.barrier()
        work.wait()
        return ledger

    for ledger in wire.threads.launch(2, body):
        by_name = {span.name: span for span in ledger.spans}
        span = by_name["all_reduce"]
        assert span.lane == "wire:z"
        assert span.start <= by_name["barrier"].start < by_name["barrier"].end <= span.end
        assert span.args["kind"] == "gradient"
        assert span.args["bytes"] == 16
        assert 0 <= span.args["exposed"] <= span.end - span.start


def digests(*calls: str, size: int = 2) -> list[int]:
    def body(world: wire.World) -> int:
        mesh = wire.Mesh(world, {"z": size})
        for call in calls:
            kind, count = call.split()
            mesh["z"].all_reduce(torch.ones(int(count)), kind).wait()
        return mesh.digest()

    return wire.threads.launch(size, body)


def test_the_digest_is_equal_on_all_ranks_and_tells_kind_size_order_and_count() -> None:
    base = digests("gradient 4", "weight 5")
    assert base[0] == base[1]
    others = [
        digests("weight 5", "gradient 4"),
        digests("gradient 4", "weight 6"),
        digests("gradient 4", "gradient 5"),
        digests("gradient 4"),
        digests("gradient 4", "weight 5", "weight 5"),
    ]
    assert base not in others
    assert digests("gradient 4", "weight 5") == base, "the same calls give the same digest in another run"
    assert float(base[0]) == base[0]


def test_messages_between_two_ranks_leave_the_digest_alone() -> None:
    def body(world: wire.World) -> int:
        mesh = wire.Mesh(world, {"pipe": 2})
        if world.rank == 0:
            mesh["pipe"].send(torch.ones(3), 1, "activation").wait()
        else:
            mesh["pipe"].receive(torch.empty(3), 0, "activation").wait()
        return mesh.digest()

    first, second = wire.threads.launch(2, body)
    assert first == second


def test_calls_are_counted() -> None:
    def body(world: wire.World) -> int:
        axis = wire.Mesh(world, {"z": 2})["z"]
        for _ in range(3):
            axis.all_reduce(torch.ones(2), "gradient").wait()
        return axis.calls

    assert wire.threads.launch(2, body) == [3, 3]


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_is_under_way_after_the_waits(size: int) -> None:
    def body(world: wire.World) -> tuple[int, int]:
        axis = wire.Mesh(world, {"z": size})["z"]
        works = [axis.all_reduce(torch.ones(3), "gradient") for _ in range(2)]
        during = axis.under_way
        for work in works:
            work.wait()
        return during, axis.under_way

    assert wire.threads.launch(size, body) == [(2 if size > 1 else 0, 0)] * size
