"""Padding of shards, and the time of the copies between a message and an arena beside one plain copy of as many bytes.

    OMP_NUM_THREADS=1 python benchmarks/arena_copies.py

A block of a GPT is laid out: every weight of it divides, or its biases do not fill lines, or its rows do not divide.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from math import prod

import torch

from fourfold.placement.arena import Arena
from fourfold.placement.layout import Layout
from fourfold.placement.precision import Precision

FP32 = Precision(torch.float32, torch.float32, torch.float32)
ROUNDS = 300
SHAPES = ((1, 1_000_003), (50_257, 3), (1, 197, 768), (2, 1_000), (768, 768), (10,))
BLOCKS = ((128, 2), (384, 2), (96, 4), (100, 3), (768, 5))


def block(width: int) -> list[tuple[int, ...]]:
    """Shapes of a GPT block's weights: norm, attention, norm, MLP."""
    wide, narrow = (width,), (4 * width,)
    attention = [(3 * width, width), (3 * width,), (width, width), wide]
    return [wide, wide, *attention, wide, wide, (4 * width, width), narrow, (width, 4 * width), wide]


def layout(shapes: list[tuple[int, ...]], parts: int) -> Layout:
    """Of trained weights of one group."""
    return Layout.of([(f"weight{number}", shape, "all") for number, shape in enumerate(shapes)], parts)


def microseconds(call: Callable[[], object]) -> float:
    """Median over the rounds."""
    spent: list[float] = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent) * 1e6


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    print("elements of all ranks' shards / elements of the weight, on 2, 4 and 8 ranks")
    for shape in SHAPES:
        ratios = [layout([shape], parts).gathered / prod(shape) for parts in (2, 4, 8)]
        print(f"  {shape!s:>16}", *(f"{ratio:9.4f}" for ratio in ratios))
    print("microseconds of one block: unpack, pack, one plain copy")
    for width, parts in BLOCKS:
        arena = Arena(layout(block(width), parts), FP32, 0, resident=False, device=torch.device("cpu"))
        arena.allocate()
        staged = torch.randn(parts, arena.layout.size)
        gradients = [torch.randn(shape) for shape in block(width)]
        target = torch.empty_like(staged)
        unpack = microseconds(lambda arena=arena, staged=staged: arena.unpack(staged))
        pack = microseconds(lambda arena=arena, gradients=gradients: arena.pack(gradients, torch.float32))
        copy = microseconds(lambda target=target, staged=staged: target.copy_(staged))
        kind = "rows do not divide" if not arena.layout.even else "padded" if arena.layout.padded else "no padding"
        print(f"  width {width:4} on {parts} ranks: {unpack:8.0f} {pack:8.0f} {copy:8.0f}   {kind}")


if __name__ == "__main__":
    main()
