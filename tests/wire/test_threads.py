"""Thread ranks: failures break out cleanly, mistakes between ranks have names, nothing hangs."""

from __future__ import annotations

import threading

import pytest
import torch

from fourfold import wire
from fourfold.wire.codecs import bf16


def axis_of(world: wire.World) -> wire.Axis:
    return wire.Mesh(world, {"data": world.size})["data"]


def test_results_come_in_rank_order_and_arguments_arrive() -> None:
    assert wire.threads.launch(4, lambda world, base: base + world.rank, 10) == [10, 11, 12, 13]


def test_a_rank_that_raises_breaks_the_others_out_and_is_named() -> None:
    seen: dict[int, Exception] = {}

    def body(world: wire.World) -> None:
        axis = axis_of(world)
        if world.rank == 1:
            raise ValueError("out of cheese")
        try:
            axis.all_reduce(torch.ones(3), "gradient").wait()
        except wire.RankFailed as error:
            seen[world.rank] = error
            raise

    with pytest.raises(wire.RankFailed, match="rank 1 of 3 failed: ValueError: out of cheese") as caught:
        wire.threads.launch(3, body, timeout=20)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)
    assert {rank: error.rank for rank, error in seen.items()} == {0: 1, 2: 1}  # type: ignore[attr-defined]
    assert all("all_reduce 1 on axis data" in str(error) for error in seen.values())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (
            lambda axis: axis.all_reduce(torch.ones(4), "gradient"),
            "rank 2 in all_reduce of gradient on data, 4 × float32",
        ),
        (lambda axis: axis.all_reduce(torch.ones(3), "weight"), "rank 2 in all_reduce of weight"),
        (lambda axis: axis.all_reduce(torch.ones(3).double(), "gradient"), "3 × float64"),
        (lambda axis: axis.all_gather(torch.ones(9), torch.ones(3), "gradient"), "rank 2 in all_gather"),
        (lambda axis: axis.broadcast(torch.ones(3), 0, "gradient"), "rank 2 in broadcast"),
        (lambda axis: axis.all_reduce(torch.ones(3), "gradient", codec=bf16.Codec()), "3 × float32 as bf16"),
    ],
)
def test_ranks_in_different_collectives_are_named(odd, says: str) -> None:
    def body(world: wire.World) -> None:
        axis = axis_of(world)
        if world.rank == 2:
            odd(axis).wait()
        else:
            axis.all_reduce(torch.ones(3), "gradient").wait()

    with pytest.raises(wire.RankFailed, match="Mismatch") as caught:
        wire.threads.launch(3, body, timeout=20)
    assert says in str(caught.value)
    assert "the others in all_reduce of gradient on data, 3 × float32" in str(caught.value)


def test_splits_that_do_not_fit_together_are_named() -> None:
    def body(world: wire.World) -> None:
        out, inp = torch.empty(2), torch.ones(2)
        axis_of(world).all_to_all(out, inp, "embedding", [1, 1], [2, 0] if world.rank else [1, 1]).wait()

    with pytest.raises(wire.RankFailed, match="expects 1 elements from rank 1, which sends [20]"):
        wire.threads.launch(2, body, timeout=20)


def test_a_rank_that_never_comes_is_named_with_the_collective() -> None:
    release = threading.Event()

    def body(world: wire.World) -> None:
        axis = axis_of(world)
        if world.rank == 1:
            release.wait(10)
            return
        try:
            axis.reduce_scatter(torch.ones(1), torch.ones(3), "gradient").wait()
        finally:
            release.set()

    with pytest.raises(wire.RankFailed) as caught:
        wire.threads.launch(3, body, timeout=0.2)
    assert "reduce_scatter of gradient on data" in str(caught.value)
    assert "rank 1 did not enter it within 0.2 s" in str(caught.value)


def test_a_rank_that_has_returned_is_not_waited_for() -> None:
    def body(world: wire.World) -> None:
        axis = axis_of(world)
        if world.rank != 2:
            axis.barrier()

    with pytest.raises(wire.RankFailed, match="rank 2 has returned and will never enter it"):
        wire.threads.launch(3, body, timeout=60)


def test_a_message_that_never_comes_names_its_sender() -> None:
    def body(world: wire.World) -> None:
        if world.rank == 0:
            axis_of(world).receive(torch.empty(1), 1, "activation", 7).wait()
        else:
            axis_of(world)

    with pytest.raises(wire.RankFailed, match="receive with tag 7 on rank 0: rank 1 has returned"):
        wire.threads.launch(2, body)


def test_a_message_of_another_size_is_named() -> None:
    def body(world: wire.World) -> None:
        axis = axis_of(world)
        if world.rank == 0:
            axis.send(torch.ones(3), 1, "activation").wait()
        else:
            axis.receive(torch.empty(2), 0, "activation").wait()

    with pytest.raises(wire.RankFailed, match=r"expected 2 × torch.float32 from rank 0, found 3 × torch.float32"):
        wire.threads.launch(2, body)


def test_an_interrupt_in_one_rank_reaches_all() -> None:
    def body(world: wire.World) -> None:
        axis = axis_of(world)
        if world.rank == 0:
            raise KeyboardInterrupt
        axis.barrier()

    with pytest.raises(wire.RankFailed) as caught:
        wire.threads.launch(2, body)
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)


def test_a_rank_that_does_not_stop_after_another_failed_is_named() -> None:
    release = threading.Event()

    def body(world: wire.World) -> None:
        if world.rank == 0:
            raise ValueError("first")
        release.wait(10)

    with pytest.raises(wire.Stalled, match=r"rank 0 failed \(first\), and rank 1 did not stop"):
        wire.threads.launch(2, body, timeout=0.2)
    release.set()


def test_torch_default_generator_is_left_alone() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()

    def body(world: wire.World) -> None:
        axis = axis_of(world)
        tensor = torch.ones(5)
        axis.all_reduce(tensor, "gradient").wait()
        axis.broadcast(tensor, 0, "weight").wait()
        axis.collect([1.0])

    wire.threads.launch(3, body)
    assert torch.equal(torch.get_rng_state(), before)


def test_launches_side_by_side_do_not_meet() -> None:
    found: list[list[list[float]]] = [[], []]

    def run(value: int) -> None:
        found[value] = wire.threads.launch(2, lambda world: axis_of(world).collect([value]))[0]

    both = [threading.Thread(target=run, args=(value,)) for value in (0, 1)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert found == [[[0.0], [0.0]], [[1.0], [1.0]]]
