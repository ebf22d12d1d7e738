"""Two pipelines in opposite directions on the same workers: each fills the bubbles of the other.

```
0 | F0.0 F0.2 .    F3.1 B3.1 F3.3 B3.3 B0.0 .    B0.2 U    U
1 | .    F1.0 F2.1 F1.2 F2.3 B2.1 B1.0 B2.3 B1.2 U    U    .
2 | .    F1.1 F2.0 F1.3 F2.2 B2.0 B1.1 B2.2 B1.3 U    U    .
3 | F0.1 F0.3 .    F3.0 B3.0 F3.2 B3.2 B0.1 .    B0.3 U    U
```

Chimera (Li and Hoefler 2021, section 3). The even micro-batches run down the workers, the odd ones up, through a second
copy of every stage; the gradients of both copies are summed before either is updated. Groups of p micro-batches follow
one another directly: a worker holds p / 2 + 1 (the outer ones) to p (the middle ones) of them. Where p | m and a
backward is no shorter than a forward, the makespan exceeds the work by (p - 2)(t_b + (m / p - 1)(t_b - t_f)).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import Action
from fourfold.schedule.greedy import greedy
from fourfold.schedule.mirror import fit, place, shares
from fourfold.schedule.order import Pipelined, Shape
from fourfold.schedule.work import B, F, Piece, Work


@dataclass(frozen=True)
class Options(Pipelined):
    """Settings."""


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield each worker's pieces, laid out greedily: backward first, then the earlier group, then the later stage.

    Raises:
        ScheduleError: an odd number of workers or micro-batches, or not one stage a worker.
    """
    del options
    fit(shape, 2, "chimera")
    p, ways = shape.workers, shares(shape)
    workers: dict[Piece, int] = {}
    holds: dict[Piece, list[Piece]] = {}
    for direction, share in enumerate(ways):
        for stage in range(p):
            worker = place(stage, direction, p)
            workers.update({(kind, stage, k): worker for k in share for kind in (F, B)})
        holds.update({(F, 0, k): [(B, 0, k - p)] for k in share[p // 2 :]})
    work = Work(shape)
    for worker, line in enumerate(greedy(workers, lambda piece: (piece[0] != B, piece[2] // p, -piece[1]), holds)):
        yield from work.laid(worker, line, ways)
