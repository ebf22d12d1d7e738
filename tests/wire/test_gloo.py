"""Real gloo processes: the same results and bits as thread ranks, and failures that name their culprit."""

from __future__ import annotations

import functools
import operator
import os
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fourfold import wire
from fourfold.wire.watch import Watch, culprits, read_all
from ranks import Processes, ProcessFailed


def values(rank: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 3


def every_collective(world: wire.World, count: int) -> dict[str, Tensor | list | int]:
    """Everything once, with several under way at a time, on the product of two axes of which one may have size 1."""
    size, rank = world.size, world.rank
    mesh = wire.Mesh(world, {"z": 2 if size % 2 == 0 else 1, "data": size // 2 if size % 2 == 0 else size})
    axis = mesh.over("z", "data")
    whole, part = values(rank, count * size), values(rank, count)
    summed, double, gathered = part.clone(), part.to(torch.bfloat16), torch.empty(size * count)
    scattered, swapped, told, got = (torch.empty(count), torch.empty(count * size), part.clone(), torch.empty(count))
    added = part.clone()
    ins = [(rank + peer) % 3 for peer in range(size)]
    uneven = torch.empty(sum(ins))
    sizes = [(2 * peer) % 3 for peer in range(size)]
    cut, pieces = torch.empty(sizes[rank]), torch.empty(sum(sizes))
    works = [
        axis.all_reduce(summed, "gradient"),
        axis.all_gather(gathered, part, "weight"),
        axis.reduce_scatter(scattered, whole, "gradient"),
        axis.all_reduce(double, "gradient"),
        axis.all_to_all(swapped, whole, "activation"),
        axis.all_to_all(uneven, part[: sum(ins)].clone(), "embedding", ins, ins),
        axis.all_gather(pieces, part[: sizes[rank]].clone(), "weight", sizes=sizes),
        axis.reduce_scatter(cut, whole[: sum(sizes)].clone(), "gradient", sizes=sizes),
        axis.broadcast(told, size - 1, "weight"),
        axis.reduce(added, 1, "weight"),
        axis.send(part, (rank + 1) % size, "activation", 3),
        axis.receive(got, (rank - 1) % size, "activation", 3),
    ]
    for work in works:
        if rank % 2:
            mesh.advance()
        work.wait()
    axis.barrier()
    return {
        "all_reduce": summed,
        "all_gather": gathered,
        "reduce_scatter": scattered,
        "bf16": double,
        "all_to_all": swapped,
        "uneven": uneven,
        "uneven gather": pieces,
        "uneven scatter": cut,
        "broadcast": told,
        "reduce": added,
        "receive": got,
        "collect": axis.collect([rank, 0.5]),
        "data": mesh["data"].collect([rank]),
        "digest": mesh.digest(),
        "sent": mesh.ledger.sent(),
    }


@pytest.mark.parametrize(("size", "count"), [(2, 1001), (3, 1000), (4, 7)])
def test_gloo_and_threads_agree_to_the_bit(gloo: Processes, size: int, count: int) -> None:
    real = gloo(size, every_collective, count)
    threads = wire.threads.launch(size, every_collective, count)
    for found, want in zip(real, threads, strict=True):
        assert found.keys() == want.keys()
        for name, value in want.items():
            same = torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value
            assert same, name
    total = functools.reduce(operator.add, [values(rank, count) for rank in range(size)])
    assert all(torch.equal(found["all_reduce"], total) for found in real)


def nothing_at_all(world: wire.World) -> int:
    axis = wire.Mesh(world, {"data": world.size})["data"]
    empty = torch.empty(0)
    works = [axis.all_reduce(empty, "gradient"), axis.all_gather(empty, empty, "weight")]
    works += [axis.reduce_scatter(empty, empty, "gradient"), axis.broadcast(empty, 0, "weight")]
    works += [axis.all_to_all(empty, empty, "activation")]
    for work in works:
        work.wait()
    few = torch.ones(2)  # fewer elements than ranks: parts of one, one and none
    axis.all_reduce(few, "gradient").wait()
    return int(few.sum())


@pytest.mark.parametrize("size", [2, 3])
def test_empty_tensors_and_empty_parts_pass(gloo: Processes, size: int) -> None:
    assert gloo(size, nothing_at_all) == [2 * size] * size


def bucketed(world: wire.World, cuts: list[int]) -> Tensor:
    axis = wire.Mesh(world, {"data": world.size})["data"]
    tensor = values(world.rank, sum(cuts))
    for work in [axis.all_reduce(bucket, "gradient") for bucket in tensor.split(cuts)]:
        work.wait()
    return tensor


def test_bits_do_not_depend_on_bucketing_on_three_ranks(gloo: Processes) -> None:
    assert torch.equal(gloo(3, bucketed, [3000])[1], gloo(3, bucketed, [1, 999, 1500, 500])[1])


def two_meshes(world: wire.World) -> list[float]:
    first, second = (wire.Mesh(world, {"z": world.size}) for _ in range(2))
    tensors = [torch.tensor([10.0**power]) for power in range(4)]
    axes = [first["z"], second["z"], first.over("z", "data"), second.over("z", "data")]
    works = [axis.all_reduce(tensor, "gradient") for axis, tensor in zip(axes, tensors, strict=True)]
    for work in works:
        work.wait()
    return [tensor.item() for tensor in tensors]


def test_groups_of_the_same_ranks_do_not_meet(gloo: Processes) -> None:
    assert gloo(3, two_meshes) == [[3.0, 30.0, 300.0, 3000.0]] * 3


def raises_in_one(world: wire.World) -> None:
    axis = wire.Mesh(world, {"data": world.size})["data"]
    if world.rank == 1:
        raise ValueError("out of cheese")
    axis.all_reduce(torch.ones(3), "gradient").wait()


def dies_in_one(world: wire.World) -> None:
    axis = wire.Mesh(world, {"data": world.size})["data"]
    axis.barrier()
    if world.rank == 2:
        os._exit(7)
    axis.all_reduce(torch.ones(3), "gradient").wait()


def disagrees_in_one(world: wire.World) -> None:
    axis = wire.Mesh(world, {"data": world.size})["data"]
    axis.all_reduce(torch.ones(1000 if world.rank else 10), "gradient").wait()
    time.sleep(20)


def test_a_rank_that_raises_is_named_and_the_pool_recovers(gloo: Processes) -> None:
    with pytest.raises(ProcessFailed, match="rank 1 raised:[^$]*out of cheese") as caught:
        gloo(3, raises_in_one)
    assert caught.value.rank == 1
    assert gloo(2, two_meshes) == [[2.0, 20.0, 200.0, 2000.0]] * 2


def test_a_rank_that_dies_is_named_and_the_others_say_in_which_collective(gloo: Processes) -> None:
    with pytest.raises(ProcessFailed) as caught:
        gloo(3, dies_in_one)
    assert caught.value.reports[2] == "died with exit code 7"
    assert "all_reduce 2 on axis data (ranks 0, 1, 2) failed" in caught.value.reports[0]


def stalls_in_one(world: wire.World, folder: str) -> str:
    world.watch = Watch(folder, world.rank)
    axis = wire.Mesh(world, {"data": world.size})["data"]
    axis.ledger.begin(6)
    axis.all_reduce(torch.ones(3), "gradient").wait()
    if world.rank == 1:
        world.watch.step(6)
        time.sleep(4)
        return "slept"
    with pytest.raises(wire.WireError) as caught:
        axis.all_gather(torch.empty(9), torch.ones(3), "weight").wait()
    return str(caught.value)


def test_a_stalled_collective_names_axis_operation_step_and_the_missing_rank(gloo: Processes, tmp_path: Path) -> None:
    said = gloo(3, stalls_in_one, str(tmp_path), timeout=30, patience=2)
    for rank in (0, 2):
        assert f"rank {rank}, step 6: all_gather 2 on axis data (ranks 0, 1, 2) failed" in said[rank]
        assert "rank 1, step 6, is not waiting; last: all_reduce 1 on axis data" in said[rank]


def hangs_in_one(world: wire.World, folder: str) -> None:
    world.watch = Watch(folder, world.rank)
    axis = wire.Mesh(world, {"data": world.size})["data"]
    if world.rank == 0:
        time.sleep(60)
    axis.barrier()


def test_the_parent_reads_from_the_watch_files_whom_the_others_wait_for(gloo: Processes, tmp_path: Path) -> None:
    with pytest.raises(ProcessFailed, match="did not return within 4 s"):
        gloo(3, hangs_in_one, str(tmp_path), timeout=4, patience=60)
    assert culprits(read_all(tmp_path)) == [0]


def test_sizes_that_differ_end_the_run_with_a_report(gloo: Processes) -> None:
    # Gloo may abort the process here: only the parent can speak for the rank.
    with pytest.raises(ProcessFailed) as caught:
        gloo(3, disagrees_in_one, timeout=15)
    assert 0 in caught.value.reports or 1 in caught.value.reports
    assert any(
        "died with exit code" in one or "all_reduce 1 on axis data" in one for one in caught.value.reports.values()
    )
