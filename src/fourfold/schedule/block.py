"""A building block: when one micro-batch passes through a V of stages, repeated every six units, and then squeezed.

Qi et al. 2024, "Pipeline parallelism with controllable memory", section 3: how long a stage's activations live in the
block decides how many are alive in the whole. A worker of the V holds an outer stage (its own number) and an inner one
(as far from the end); two forwards, two backwards of the input and two of the weight fill its period.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from fourfold.schedule.action import Action
from fourfold.schedule.greedy import greedy
from fourfold.schedule.order import Shape
from fourfold.schedule.work import F, I, Piece, W, Work

PERIOD = 6


class Starts(NamedTuple):
    """When the passes of micro-batch 0 start on one worker, in units of one pass; no two agree modulo the period."""

    outer_forward: int
    inner_forward: int
    inner_backward: int
    outer_backward: int


def squeezed(shape: Shape, starts: Callable[[int], Starts]) -> Iterator[Action]:
    """Yield every piece as early as its inputs allow while no stage holds more than in the block.

    What the block holds of a stage is counted twice: what waits for a backward of the input, and what waits for one of
    the weight. Of the pieces that are ready, forwards and backwards of the input go first, in the block's sequence,
    then backwards of the weight, the oldest micro-batch's first.
    """
    every = range(shape.microbatches)
    start: dict[Piece, int] = {}
    workers: dict[Piece, int] = {}
    holds: dict[Piece, list[Piece]] = {}
    for worker in range(shape.workers):
        for (kind, stage), time in _times(worker, shape.stages - 1 - worker, starts(worker)).items():
            workers.update({(kind, stage, k): worker for k in every})
            start.update({(kind, stage, k): time + PERIOD * k for k in every})
    for stage in range(shape.stages):
        for end in (I, W):
            held = -((start[F, stage, 0] - start[end, stage, 0] - 1) // PERIOD)
            for k in every[held:]:
                holds.setdefault((F, stage, k), []).append((end, stage, k - held))

    def rank(piece: Piece) -> tuple[int, ...]:
        kind, stage, microbatch = piece
        return (1, microbatch, -stage) if kind == W else (0, start[piece])

    work = Work(shape)
    for worker, line in enumerate(greedy(workers, rank, holds)):
        yield from work.laid(worker, line)


def _times(outer: int, inner: int, starts: Starts) -> dict[tuple[str, int], int]:
    """When each pass of micro-batch 0 starts; those of the weights in the gaps that the others leave, inner first."""
    times = {
        (F, outer): starts.outer_forward,
        (F, inner): starts.inner_forward,
        (I, inner): starts.inner_backward,
        (I, outer): starts.outer_backward,
    }
    for stage in (inner, outer):
        taken = {time % PERIOD for time in times.values()}
        after = times[I, stage] + 1
        times[W, stage] = next(time for time in range(after, after + PERIOD) if time % PERIOD not in taken)
    return times
