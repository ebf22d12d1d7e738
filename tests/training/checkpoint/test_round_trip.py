"""Any boxes saved, any boxes loaded: what comes back is the logical tensor, bit for bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fourfold.training.checkpoint import Box, latest, load, save

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)
Cut = list[tuple[tuple[int, ...], tuple[int, ...]]]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits of any dtype (NaNs included)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> Cut:
    """The shape cut into boxes by up to six random cuts (some at an edge: empty boxes), in random order."""
    cut: Cut = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        offsets, sizes = cut.pop(draw(st.integers(0, len(cut) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dim]))
        for start, stop in ((0, at), (at, sizes[dim])):
            cut.append(
                (
                    (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]),
                    (*sizes[:dim], stop - start, *sizes[dim + 1 :]),
                )
            )
    return draw(st.permutations(cut))


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[tuple[int, ...], torch.dtype, Cut, Cut]]:
    """Up to three logical tensors, each with its tiling when saved and when loaded."""
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        tensors.append((shape, draw(st.sampled_from(DTYPES)), draw(tilings(shape)), draw(tilings(shape))))
    return tensors


def dealt(tensors: list[tuple[str, torch.Tensor, Cut]], ranks: int, deal: list[int]) -> list[list[Box]]:
    """The boxes of every rank. Each is a view of one flat arena of the rank and dtype, as placement's are."""
    hands: list[list[Box]] = [[] for _ in range(ranks)]
    turn = 0
    for name, full, cut in tensors:
        for offsets, sizes in cut:
            region = full[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            arena = torch.zeros(region.numel() + 2, dtype=full.dtype)
            view = arena[1 : 1 + region.numel()].view(sizes)
            view.copy_(region)
            hands[deal[turn % len(deal)] % ranks].append(Box(name, tuple(full.shape), offsets, view))
            turn += 1
    return hands


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layouts(), st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers()
)
def test_any_boxes_load_from_any_boxes(tensors, writers, readers, deal, seed):
    full = {f"t.{i}": values(shape, dtype, seed % 1000 + i) for i, (shape, dtype, _, _) in enumerate(tensors)}
    saved = dealt([(n, t, tensors[i][2]) for i, (n, t) in enumerate(full.items())], writers, deal)
    blank = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    wanted = dealt([(n, t, tensors[i][3]) for i, (n, t) in enumerate(blank.items())], readers, deal[::-1])
    with TemporaryDirectory() as place:
        folder = Path(place)
        savings = [save(folder, 7, saved[r], {"seed": seed}, rank=r, writers=range(writers)) for r in range(writers)]
        for saving in savings:
            saving.wait()
        path = latest(folder)
        assert path is not None and path == folder / "step-00000007"
        for hand in wanted:
            assert load(path, hand, expected=full) == {"seed": seed}
    for box in (box for hand in wanted for box in hand):
        region = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        assert bits(box.tensor) == bits(full[box.name][region])


def test_packed_rows_cut_over_three_axes(tmp_path: Path):
    """q|k|v packed in 30 rows, each cut over y, then the local rows over z, columns over x, all unevenly."""

    def ceil(count: int, parts: int, index: int) -> tuple[int, int]:
        width = -(-count // parts)
        return min(index * width, count), min((index + 1) * width, count)

    def hand(full: torch.Tensor, grid: tuple[int, int, int], at: tuple[int, ...]) -> list[Box]:
        (x, y, z), (xi, yi, zi) = grid, at
        left, right = ceil(7, x, xi)
        bands = [(p * 10 + ceil(10, y, yi)[0], p * 10 + ceil(10, y, yi)[1]) for p in range(3)]
        low, high = ceil(sum(b - a for a, b in bands), z, zi)
        found, passed = [], 0
        for a, b in bands:
            start, stop = max(low - passed, 0), min(high - passed, b - a)
            if start < stop:
                found.append(Box("qkv", (30, 7), (a + start, left), full[a + start : a + stop, left:right]))
            passed += b - a
        return found

    def ranks(grid: tuple[int, int, int]):
        return list(product(*map(range, grid)))

    full = torch.arange(210, dtype=torch.float64).view(30, 7)
    grid = (2, 3, 4)
    names = range(len(ranks(grid)))
    savings = [save(tmp_path, 1, hand(full, grid, at), {}, rank=r, writers=names) for r, at in enumerate(ranks(grid))]
    path = [saving.wait() for saving in savings][0]
    for other in ((1, 1, 3), (2, 1, 1), (3, 4, 5), (1, 1, 1)):
        blank = torch.full_like(full, -1)
        for at in ranks(other):
            load(path, hand(blank, other, at), expected={"qkv"})
        assert torch.equal(blank, full)
