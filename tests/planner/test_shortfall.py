"""What a step loses to another: the parts that are told add up to the whole."""

from __future__ import annotations

import re

import pytest

from fourfold.planner.clock import Timing
from fourfold.planner.shortfall import shortfall

BEST = Timing(compute=0.300, update=0.010, exposed={"z": 0.080, "y": 0.001}, stretched=0.004)


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        (
            Timing(compute=0.398, update=0.010, exposed={"z": 0.0041, "y": 0.001}),
            "+18.1 ms: compute +94.0, waiting for z -75.9",
        ),
        (
            Timing(compute=0.304, update=0.030, exposed={"y/2": 0.011, "x": 0.080, "data": 0.005}),
            "+35.0 ms: waiting for x +80.0, waiting for z -80.0, the update +20.0, others +15.0",
        ),
        (Timing(compute=2.304, update=0.010, exposed={"z": 0.080}), "+2.00 s: compute +2.00"),
        (Timing(compute=0.294, update=0.010, exposed={"z": 0.080, "y": 0.001}), "-10.0 ms: compute -10.0"),
        (BEST, "as fast"),
        (Timing(compute=0.30001, update=0.010, exposed={"z": 0.080, "y": 0.001}, stretched=0.004), "as fast"),
    ],
)
def test_net_and_what_is_more_and_what_is_less(mine: Timing, said: str) -> None:
    found = shortfall(mine, BEST)
    assert found == said
    net, *parts = [float(number) for number in re.findall(r"[+-]\d+\.\d+", found)] or [0.0]
    assert net == pytest.approx(sum(parts), abs=0.1 if "ms" in found else 0.01)
