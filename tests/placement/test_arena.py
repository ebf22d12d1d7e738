"""Copies between messages and arenas, against an oracle that knows of nothing but logical boxes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawn import Weights, weights
from fourfold import wire
from fourfold.placement.arena import Arena
from fourfold.placement.layout import Layout, Slot
from fourfold.placement.piece import Piece
from fourfold.placement.precision import Precision
from fourfold.training.optimizer import OptimizerOptions
from fourfold.training.run import parallelize
from plain import Work, gpt

FP64 = Precision(torch.float64, torch.float64, torch.float64)
UPCAST = Precision(torch.float32, torch.bfloat16, torch.float32)
CPU = torch.device("cpu")
precisions = st.sampled_from([FP64, UPCAST])


def box(whole: Tensor, piece: Piece) -> Tensor:
    """The logical elements of a piece, flat."""
    return whole[tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))].reshape(-1)


def naive(layout: Layout, index: int, whole: dict[str, Tensor], slots: tuple[Slot, ...], size: int) -> Tensor:
    """[size] rank `index`'s shard: every piece at its place, zeros between."""
    shard = torch.zeros(size, dtype=torch.float64)
    for slot in slots:
        for piece in slot.pieces(index):
            piece.of(shard).view(-1).copy_(box(whole[slot.name], piece))
    return shard


def drawn(layout: Layout, seed: int) -> dict[str, Tensor]:
    """Logical tensors of small whole numbers, none of them zero: exact in every element type."""
    generator = torch.Generator().manual_seed(seed)
    return {s.name: torch.randint(1, 100, s.shape, generator=generator).double() for s in layout.slots}


def filled(layout: Layout, precision: Precision, index: int, whole: dict[str, Tensor], *, resident: bool) -> Arena:
    arena = Arena(layout, precision, index, resident=resident, device=CPU)
    arena.fill(lambda name, start, stop, dtype: whole[name].reshape(-1)[start:stop].to(dtype))
    return arena


@given(weights, st.integers(1, 5), precisions, st.integers(0, 2**31))
def test_gathered_shards_are_the_weights(listed: Weights, parts: int, precision: Precision, seed: int) -> None:
    """fill -> gather -> unpack gives every weight."""
    layout = Layout.of(listed, parts)
    whole = drawn(layout, seed)
    arenas = [filled(layout, precision, index, whole, resident=False) for index in range(parts)]
    for index, arena in enumerate(arenas):
        assert torch.equal(arena.shard.double(), naive(layout, index, whole, layout.slots, layout.size))
    arena = arenas[-1]
    arena.allocate()
    arena.unpack(torch.stack([arena.message() for arena in arenas]))
    for name, view in arena.views().items():
        assert torch.equal(view.double(), whole[name])


@given(weights, st.integers(2, 5), precisions, st.integers(0, 2**31))
def test_a_refresh_of_the_trained_prefix_leaves_frozen_weights(
    listed: Weights, parts: int, precision: Precision, seed: int
) -> None:
    layout = Layout.of(listed, parts)
    before, after = drawn(layout, seed), drawn(layout, seed + 1)
    arena = filled(layout, precision, 0, before, resident=True)
    assert arena.rest is not None
    staged = torch.stack([naive(layout, index, after, layout.slots, layout.size) for index in range(parts)])
    arena.unpack(staged[:, : layout.trained].to(precision.message), into_rest=True)
    trained = {slot.name for slot in layout.trained_slots}
    for slot in layout.slots:
        place = arena.rest[slot.full_start : slot.full_start + slot.numel].view(slot.shape)
        assert torch.equal(place.double(), (after if slot.name in trained else before)[slot.name])
    rest = arena.rest.double().sum()
    assert rest == sum((after if name in trained else before)[name].sum() for name in before)  # padding is zero


@given(weights, st.integers(1, 5), st.data())
def test_packed_gradients_are_every_rank_s_rows_and_zeros(listed: Weights, parts: int, data: st.DataObject) -> None:
    """Whole, transposed and missing gradients, in the message's type and in another."""
    layout = Layout.of(listed, parts)
    whole = drawn(layout, data.draw(st.integers(0, 2**31)))
    missing = data.draw(st.sets(st.sampled_from([slot.name for slot in layout.slots]), max_size=1))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    gradients = [None if slot.name in missing else _transposed(whole[slot.name]) for slot in layout.trained_slots]
    message = Arena(layout, FP64, 0, resident=False, device=CPU).pack(gradients, dtype)
    assert (message.shape, message.dtype) == ((parts, layout.trained), dtype)
    came = tuple(slot for slot in layout.trained_slots if slot.name not in missing)
    for index in range(parts):
        assert torch.equal(message[index].double(), naive(layout, index, whole, came, layout.trained))


def _transposed(tensor: Tensor) -> Tensor:
    """The same values in column-major storage, as autograd may hand them over."""
    return tensor.T.contiguous().T if tensor.dim() == 2 else tensor


@given(weights, st.integers(0, 2**31))
def test_one_part_is_one_storage(listed: Weights, seed: int) -> None:
    """Shard, resting and full weights are one; a gradient's place is where the shard has its weight."""
    layout = Layout.of(listed, 1)
    whole = drawn(layout, seed)
    arena = filled(layout, FP64, 0, whole, resident=True)
    assert arena.full is arena.rest is arena.shard
    for slot, place in zip(layout.trained_slots, arena.places(), strict=True):
        place.copy_(whole[slot.name])
    for name, view in arena.views().items():
        assert torch.equal(view, whole[name])
    assert torch.equal(arena.gradient, arena.shard[: layout.trained])


@pytest.mark.parametrize("level", ["optimizer", "parameters"])
def test_padding_stays_zero_in_a_run(level: str) -> None:
    """The norm of the gradient sums whole segments, and AdamW updates them: nothing may grow between the rows."""
    work = Work(gpt(0.2), options=OptimizerOptions(lr=1e-2, clip=0.5))
    plan = {"placement": {"z": 3, "shard": level, "precision": "fp64"}, "schedule": {"microbatches": 2}}

    def body(world: wire.World) -> int:
        run = parallelize(work.fresh(), work.loss, work.options, plan, world=world)
        for step in range(3):
            run.step(work.batch(step))
        padding = 0
        for unit in run.placed.units:
            arena = unit.arena
            free = torch.ones(arena.layout.size, dtype=torch.bool)
            for slot in arena.layout.slots:
                for piece in slot.pieces(arena.index):
                    piece.of(free).fill_(False)
            assert not arena.shard[free].any() and arena.shard[~free].all()
            assert not arena.gradient[free[: arena.layout.trained]].any()
            padding += int(free.sum())
        return padding

    assert all(padding > 0 for padding in wire.threads.launch(3, body))
