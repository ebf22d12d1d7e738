"""Lays orders with several stages or copies a worker over a shape, measures them and draws them.

All times are of a worker's whole share: a stage of one of several on a worker takes its part of them.
"""

from fractions import Fraction
from importlib import import_module
from typing import NamedTuple

from fourfold.schedule import Program, Shape, bind, draw, simulate, validate
from fourfold.schedule.figures import excess, held, span_bubble
from fourfold.schedule.work import B, F, I, W

STAGES = {"zb_v": 2, "v_half": 2, "v_min": 2, "hanayo": 2, "chimera": 1, "dualpipe": 1, "dualpipev": 2}
"""Stages a worker; Hanayo's with one wave."""
EVEN, UNEVEN = (1, 1, 1), (1, Fraction(6, 5), Fraction(4, 5))
"""Forward, backward of the input, backward of the weight."""


def lay(name: str, p: int, m: int, waves: int = 1) -> tuple[Program, Shape]:
    order, options = (getattr(import_module(f"fourfold.schedule.orders.{name}"), part) for part in ("order", "Options"))
    settings = {"waves": waves} if name == "hanayo" else {}
    shape = Shape(STAGES[name] * waves * p, m, p, STAGES[name] * waves)
    return validate(bind(order(shape, options(m, **settings)), p), shape), shape


class Figures(NamedTuple):
    """In units of `times`, a whole worker's pass.

    Attributes:
        makespan: to the end of the last piece.
        excess: of the makespan over the work of one worker.
        span: the longest that a worker idles between its first pass and its last.
        held: the most forwards whose backward is not complete, per worker, in stages.
    """

    makespan: Fraction
    excess: Fraction
    span: Fraction
    held: list[int]


Times = tuple[float | Fraction, ...]
"""(F, B) or (F, I, W)."""


def costs(times: Times) -> dict[str, float]:
    forward, *backward = map(float, times)
    return {F: forward, B: sum(backward), I: backward[0], W: backward[-1], "move": 0, "reduce": 0}


def measure(name: str, p: int, m: int, times: Times, waves: int = 1) -> Figures:
    """Figures of an order; updates, reductions and transfers are free."""
    program, shape = lay(name, p, m, waves)
    ticks = 5 * shape.chunks  # a whole number of them a piece, so that sums are exact
    cost = {**costs(tuple(time * 5 for time in times)), "update": 0}
    timeline = simulate(program, lambda action: round(cost[action.kind]))
    makespan, over, span = (
        Fraction(time) / ticks for time in (timeline.makespan, excess(timeline), span_bubble(timeline))
    )
    return Figures(makespan, over, span, held(program))


def staircase(name: str, p: int, m: int, times: Times) -> str:
    cost = {**costs(times), "update": 1}
    return draw(simulate(lay(name, p, m)[0], lambda action: cost[action.kind]))
