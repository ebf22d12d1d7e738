"""The mesh: who is where, products of axes, and what is refused."""

from __future__ import annotations

import gc

import pytest
import torch

from fourfold import wire
from fourfold.ledger import Ledger
from fourfold.wire import formulas
from fourfold.wire.axis import axis_of
from fourfold.wire.dry import dry_mesh

SHAPE = {"x": 2, "z": 3, "data": 2}


def test_x_is_fastest_then_y_z_data_pipe() -> None:
    def body(world: wire.World):
        mesh = wire.Mesh(world, SHAPE)
        return mesh.coordinates, {name: tuple(mesh[name].members) for name in ("x", "y", "z", "data", "pipe")}

    for rank, (at, members) in enumerate(wire.threads.launch(12, body)):
        assert rank == at["x"] + 2 * (at["y"] + 1 * (at["z"] + 3 * (at["data"] + 2 * at["pipe"])))
        assert members["x"] == tuple(rank - at["x"] + step for step in range(2))
        assert members["z"] == tuple(rank - 2 * at["z"] + 2 * step for step in range(3))
        assert members["data"] == tuple(rank - 6 * at["data"] + 6 * step for step in range(2))
        assert members["y"] == members["pipe"] == (rank,)


def test_a_product_is_in_the_mesh_order_whatever_order_it_is_asked_in() -> None:
    def body(world: wire.World):
        mesh = wire.Mesh(world, SHAPE)
        both = mesh.over("data", "z")
        assert both is mesh.over("z", "data")
        return both.name, both.size, both.index, both.collect([world.rank]), mesh.over("x", "z", "data").size

    for rank, (name, size, index, ranks, all_of_them) in enumerate(wire.threads.launch(12, body)):
        assert (name, size, all_of_them) == ("z+data", 6, 12)
        assert ranks == [[float(rank % 2 + 2 * step)] for step in range(6)]
        assert ranks[index] == [float(rank)]


def test_a_part_is_the_consecutive_ranks_of_an_axis_that_this_one_is_among() -> None:
    def body(world: wire.World):
        mesh = wire.Mesh(world, {"x": 2, "y": 6})
        part = mesh.part("y", 3)
        assert part is mesh.part("y", 3) and mesh.part("y", 6) is mesh["y"]
        tensor = torch.tensor([float(mesh["y"].index)])
        part.all_reduce(tensor, "gradient").wait()
        alone, both = mesh.part("y", 1), mesh.part("y+x", 4)
        assert (alone.size, alone.name, both.name) == (1, "y/1", "x+y/4")
        metered = {flow.axis: one.bytes for flow, one in mesh.ledger.traffic().items()}
        assert Ledger.from_dict(mesh.ledger.to_dict()).traffic() == mesh.ledger.traffic()
        return part.name, part.index, tensor.item(), list(both.members), metered

    results = wire.threads.launch(12, body)
    for rank, (name, index, total, members, metered) in enumerate(results):
        y = rank // 2
        assert (name, index, total) == ("y/3", y % 3, 3.0 if y < 3 else 12.0)
        assert members == list(range(rank - rank % 4, rank - rank % 4 + 4))
        assert metered == {"y/3": formulas.all_reduce(3, 4, 4, y % 3)}


def test_the_digest_counts_what_is_equal_on_all_ranks() -> None:
    """Parts of axes too, but no axis that cuts features alone: what crosses there is as large as a rank has rows."""

    def body(world: wire.World) -> list[int]:
        mesh = wire.Mesh(world, {"y": 2, "z": 2, "data": 2})
        digests = [mesh.digest()]
        for axis in (mesh["y"], mesh.part("data", 2), mesh["z"]):
            axis.all_reduce(torch.zeros(3 + (axis.name == "y") * mesh["z"].index), "gradient").wait()
            digests.append(mesh.digest())
        return digests

    results = wire.threads.launch(8, body)
    assert all(result == results[0] for result in results)
    begun, features, data, z = results[0]
    assert begun == features and len({features, data, z}) == 3


@pytest.mark.parametrize(("name", "size", "says"), [("y", 4, "parts of 4; try 1, 2, 3, 6"), ("y", 0, "parts of 0")])
def test_parts_that_cannot_be(name: str, size: int, says: str) -> None:
    with pytest.raises(wire.UsageError, match=says):
        dry_mesh({"y": 6}).part(name, size)


def test_collectives_on_different_axes_do_not_meet() -> None:
    def body(world: wire.World):
        mesh = wire.Mesh(world, SHAPE)
        works = []
        tensors = {name: torch.tensor([float(world.rank)]) for name in SHAPE}
        for name, tensor in tensors.items():
            works.append(mesh[name].all_reduce(tensor, "gradient"))
        for work in works:
            work.wait()
        return {name: tensor.item() for name, tensor in tensors.items()}, {n: sum(mesh[n].members) for n in SHAPE}

    assert all(sums == want for sums, want in wire.threads.launch(12, body))


def test_two_meshes_over_the_same_ranks_do_not_meet() -> None:
    def body(world: wire.World):
        first, second = (wire.Mesh(world, {"z": 2})["z"] for _ in range(2))
        a, b = torch.tensor([1.0]), torch.tensor([10.0])
        works = [first.all_reduce(a, "gradient"), second.all_reduce(b, "gradient")]
        for work in reversed(works):
            work.wait()
        return a.item(), b.item()

    assert wire.threads.launch(2, body) == [(2.0, 20.0)] * 2


def test_a_world_of_one_needs_no_group() -> None:
    mesh = wire.Mesh(wire.join(), {})
    tensor, out = torch.ones(3), torch.empty(3)
    mesh["data"].all_reduce(tensor, "gradient").wait()
    mesh.over("z", "data").all_gather(out, tensor, "weight").wait()
    mesh["z"].barrier()
    assert out.tolist() == [1.0] * 3
    assert mesh["z"].collect([4.0]) == [[4.0]]
    assert mesh.ledger.traffic() == {}


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"z": 3}, "mesh z 3 needs 3 ranks, the world has 1"),
        ({"dat": 1}, "no axis 'dat' .did you mean 'data'"),
        ({"z": 0}, "size of at least 1, found 0"),
    ],
)
def test_meshes_that_cannot_be(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(wire.UsageError, match=says):
        wire.Mesh(wire.join(), sizes)


def test_an_absent_axis_has_size_one_and_an_unknown_one_is_refused() -> None:
    mesh = wire.Mesh(wire.join(), {"z": 1})
    assert (mesh["expert"].size, mesh["expert"].index) == (1, 0)
    with pytest.raises(wire.UsageError, match="did you mean 'pipe'"):
        mesh["pip"]


def test_an_axis_is_found_by_its_key_as_long_as_its_mesh_lives() -> None:
    mesh = wire.Mesh(wire.join(), {})
    key = mesh["z"].key
    assert axis_of(key) is mesh["z"]
    assert len({mesh[name].key for name in mesh.sizes}) == len(mesh.sizes)
    del mesh
    gc.collect()
    with pytest.raises(wire.UsageError, match="keep its mesh alive"):
        axis_of(key)
