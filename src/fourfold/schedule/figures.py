"""What schedules are compared by: idle time and micro-batches in flight, measured on a timeline.

The literature has two idle times. Of a whole pipeline, the `bubble`: the share of workers' time, from the first start
to the last end, in which they compute nothing. Of zero-bubble orders, whose workers may begin their next step as soon
as they are done with this one, the `span_bubble`, which leaves the fill before a worker's first action and the drain
after its last out.
"""

from __future__ import annotations

from itertools import accumulate

from fourfold.schedule.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, STASH
from fourfold.schedule.program import Lane, Program
from fourfold.schedule.timeline import Timeline

STEPS = {FORWARD: 1, BACKWARD: -1, BACKWARD_INPUT: 0, BACKWARD_WEIGHT: -1}
"""By how much a pass changes what is in flight."""


def excess(timeline: Timeline) -> float:
    """Seconds by which the makespan exceeds the work of the busiest worker."""
    return timeline.makespan - max(timeline.busy(worker) for worker in range(timeline.program.workers))


def bubble(timeline: Timeline) -> float:
    """The idle share of all workers' time, from 0 to 1."""
    workers, makespan = timeline.program.workers, timeline.makespan
    busy = sum(timeline.busy(worker) for worker in range(workers))
    return 1 - busy / (workers * makespan) if makespan else 0.0


def span_bubble(timeline: Timeline) -> float:
    """Seconds that the worst worker idles between the start of its first pass and the end of its last."""
    found = [0.0]
    for worker in range(timeline.program.workers):
        spans = [
            (start, end)
            for number in passes(timeline.program, worker)
            if (start := timeline.starts[number]) is not None and (end := timeline.ends[number]) is not None
        ]
        if spans:
            found.append(spans[-1][1] - spans[0][0] - sum(end - start for start, end in spans))
    return max(found)


def held(program: Program) -> list[int]:
    """Per worker, the most passes of one stage and micro-batch that went forward and are not yet all the way back.

    A backward in two halves is done when that of the weight is.
    """
    flights = []
    for worker in range(program.workers):
        steps = (STEPS[program.actions[number].kind] for number in passes(program, worker))
        flights.append(max(accumulate(steps), default=0))
    return flights


def kept(timeline: Timeline) -> list[int]:
    """Per worker, the most stashes that lay there at once; one that moves counts at both ends."""
    return list(timeline.peaks(lambda buffer: int(buffer.kind == STASH)).values())


def passes(program: Program, worker: int) -> list[int]:
    """The numbers of a worker's forwards and backwards, whole or in halves, in running order."""
    lane = program.lanes.get(Lane(worker, "compute"), ())
    return [number for number in lane if program.actions[number].kind in STEPS]
