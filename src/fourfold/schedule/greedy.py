"""List scheduling: whoever has nothing to do takes the best of the pieces that are ready.

Every piece lasts one unit of time here, whatever it will really take. Where an order bounds what is in flight that is
no loss: laid out for backward passes of twice the length, Chimera and Hanayo idle more at that very length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush

from fourfold.schedule.work import Piece, inputs

Rank = Callable[[Piece], tuple[int, ...]]
"""Of the pieces that one worker could run, the one of lowest rank goes first."""


def greedy(workers: Mapping[Piece, int], rank: Rank, holds: Mapping[Piece, Iterable[Piece]]) -> list[list[Piece]]:
    """Return each worker's pieces in the sequence in which it runs them.

    Equal ranks go by kind, stage and micro-batch, so that nothing depends on the sequence of `workers`. Pieces that
    wait for each other in a circle are left out, and `validate` misses them.

    Args:
        workers: every piece of every stage, and who runs it.
        rank: of a piece.
        holds: what a piece waits for beside its inputs, so that few micro-batches are in flight.
    """
    followers, needs = _edges(workers, holds)
    ready: list[list[tuple[tuple[int, ...], Piece]]] = [[] for _ in range(max(workers.values()) + 1)]
    ran: list[list[Piece]] = [[] for _ in ready]
    freed = [piece for piece, count in needs.items() if not count]
    while freed or any(ready):
        for piece in freed:
            heappush(ready[workers[piece]], (rank(piece), piece))
        freed = []
        for heap, line in zip(ready, ran, strict=True):
            if heap:
                line.append(heappop(heap)[1])
                for follower in followers[line[-1]]:
                    needs[follower] -= 1
                    if not needs[follower]:
                        freed.append(follower)
    return ran


def _edges(
    workers: Mapping[Piece, int], holds: Mapping[Piece, Iterable[Piece]]
) -> tuple[defaultdict[Piece, list[Piece]], dict[Piece, int]]:
    """Who waits for each piece, and for how many each piece waits."""
    last = max(stage for _, stage, _ in workers)
    followers: defaultdict[Piece, list[Piece]] = defaultdict(list)
    needs: dict[Piece, int] = {}
    for piece in workers:
        before = {*inputs(piece, last), *holds.get(piece, ())}
        needs[piece] = len(before)
        for other in before:
            followers[other].append(piece)
    return followers, needs
