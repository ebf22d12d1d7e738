"""What `fourfold schedule draw` lays out of schedules that are no list of one step."""

import pytest

from fourfold.cli.schedules import STEPS, laid
from fourfold.schedule.action import UPDATE
from fourfold.schedule.costs import Costs


@pytest.mark.parametrize(("name", "microbatches"), [("pipedream", 1), ("pipedream-2bw", 4), ("spectrain", 1)])
def test_an_order_without_a_flush_is_laid_over_several_steps(name: str, microbatches: int) -> None:
    found = laid(name, 3, microbatches, (), Costs())
    assert found.shape.microbatches == STEPS * microbatches
    assert sum(action.kind == UPDATE for action, _, _ in found.timeline) == STEPS * 3


def test_a_message_driven_one_runs_what_comes_first() -> None:
    drawn = laid("message-driven", 3, 4, ("limit=2",), Costs(backward_input=0.5, backward_weight=0.5)).text()
    assert "1 | .  F0 F1 .  B0 .  B1 F2 .  F3 B2 .  B3 U" in drawn
