"""No sequence of its own: a worker runs whatever has come first, and only what is in flight is limited.

```
0 | F0 F1 .  .  .  B0 F2 B1 F3 .  .  B2 .  B3 U
1 | .  F0 F1 .  B0 .  B1 F2 .  F3 B2 .  B3 U  .
2 | .  .  F0 B0 F1 B1 .  .  F2 B2 F3 B3 U  .  .
```

AxoNN's first engine (Singh and Bhatele 2021, section 4): the first stage sends a new micro-batch in only when one has
come all the way back (here, of two), and every message is worked on when it arrives. Run in its `mode`; what the
generator yields is one sequence within the limit, that of 1F1B, and the way out of whatever the messages do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fourfold.schedule.action import Action
from fourfold.schedule.budget import Budget
from fourfold.schedule.looped import fit, forward_first
from fourfold.schedule.order import Microbatches, Shape
from fourfold.schedule.ready import Mode
from fourfold.schedule.work import Work


@dataclass(frozen=True)
class Options(Microbatches):
    """Settings.

    Attributes:
        limit: micro-batches in flight at once; as many as there are workers keep all of them busy.
    """

    limit: int = 4


def order(shape: Shape, options: Options) -> Iterator[Action]:
    """Yield warm-up, steady state and drain of each worker.

    Raises:
        ScheduleError: not one stage a worker.
    """
    fit(shape, "message_driven")
    work = Work(shape)
    for worker in range(shape.workers):
        ahead = min(options.limit, shape.workers - worker) - 1
        yield from work.laid(worker, forward_first(shape, worker, ahead))


def mode(shape: Shape, options: Options) -> Mode:
    """What comes first is run first, within the limit."""
    return Mode(Budget([options.limit] * shape.workers), "arrived")
