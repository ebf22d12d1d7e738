"""The ledger counts by step, axis, kind and operation, and a forecast minus a measurement is a table."""

from __future__ import annotations

from fourfold.ledger import Difference, Flow, Ledger, Span, Traffic
from fourfold.ledger.ledger import KEPT, KINDS, MEMORY


def test_bytes_and_calls_add_up_by_flow() -> None:
    ledger = Ledger()
    ledger.send("z", "weight", "all_gather", 30)
    ledger.send("z", "weight", "all_gather", 12)
    ledger.send("z", "gradient", "reduce_scatter", 7, calls=3)
    ledger.send("data", "gradient", "all_reduce", 5)
    assert ledger.traffic(0) == {
        Flow("z", "weight", "all_gather"): Traffic(2, 42),
        Flow("z", "gradient", "reduce_scatter"): Traffic(3, 7),
        Flow("data", "gradient", "all_reduce"): Traffic(1, 5),
    }
    assert ledger.sent() == 54
    assert ledger.sent(axis="z") == 49
    assert ledger.sent(kind="gradient") == 12
    assert ledger.sent(axis="z", kind="gradient") == 7
    assert ledger.sent(axis="y") == 0


def test_each_step_is_counted_on_its_own_and_may_be_resumed() -> None:
    ledger = Ledger(step=4)
    ledger.send("z", "weight", "all_gather", 1)
    ledger.begin(5)
    ledger.send("z", "weight", "all_gather", 10)
    ledger.begin(4)
    ledger.send("z", "weight", "all_gather", 100)
    assert (ledger.sent(4), ledger.sent(5), ledger.sent()) == (101, 10, 111)
    assert ledger.sent(9) == 0
    assert ledger.traffic() == {Flow("z", "weight", "all_gather"): Traffic(3, 111)}


def test_the_sum_over_steps_is_a_copy() -> None:
    ledger = Ledger()
    ledger.send("z", "weight", "all_gather", 1)
    ledger.traffic()[Flow("z", "weight", "all_gather")].bytes = 99
    assert ledger.sent() == 1


def test_a_long_run_keeps_the_last_steps_and_the_sum_of_the_others() -> None:
    ledger = Ledger()
    ledger.begin(-1)
    ledger.send("z", "control", "all_gather", 3)
    for step in range(2 * KEPT):
        ledger.begin(step)
        ledger.send("z", "weight", "all_gather", 10)
    assert len(ledger.steps) == KEPT
    assert ledger.sent(2 * KEPT - 1) == ledger.sent(KEPT + 1) == 10
    assert (ledger.sent(0), ledger.sent(-1)) == (0, 3)
    assert ledger.sent() == 20 * KEPT + 3
    assert ledger.traffic()[Flow("z", "weight", "all_gather")] == Traffic(2 * KEPT, 20 * KEPT)
    assert Ledger.from_dict(ledger.to_dict()).traffic() == ledger.traffic()


def test_spans_are_kept_only_while_recording() -> None:
    ledger = Ledger()
    ledger.span("compute", "forward", 1, 2)
    ledger.recording = True
    ledger.span("wire:z", "all_gather", 3, 9, exposed=4)
    assert ledger.spans == [Span("wire:z", "all_gather", 3, 9, {"exposed": 4})]


def test_peaks_only_rise() -> None:
    ledger = Ledger()
    for value in (5, 9, 2):
        ledger.peak("activations", value)
    assert ledger.memory == {"activations": 9}


def test_forecast_minus_measurement_is_a_table_of_everything_either_has() -> None:
    forecast, measured = Ledger(), Ledger(step=7)
    forecast.send("z", "weight", "all_gather", 110)
    measured.send("z", "weight", "all_gather", 100)
    measured.send("data", "gradient", "all_reduce", 50)
    forecast.send("z", "gradient", "reduce_scatter", 8)
    forecast.peak("parameters", 40)
    measured.peak("parameters", 50)
    forecast.notes |= {"flops": 10.0, "only here": 1.0}
    measured.notes |= {"flops": 10.0}
    assert forecast - measured == [
        Difference("bytes data gradient all_reduce", 0, 50, -1.0),
        Difference("bytes z gradient reduce_scatter", 8, 0, None),
        Difference("bytes z weight all_gather", 110, 100, 0.1),
        Difference("memory parameters", 40, 50, -0.2),
        Difference("flops", 10.0, 10.0, 0.0),
    ]


def test_a_forecast_of_one_step_is_compared_with_the_current_step_only() -> None:
    forecast, measured = Ledger(), Ledger()
    forecast.send("z", "weight", "all_gather", 10)
    for step in range(3):
        measured.begin(step)
        measured.send("z", "weight", "all_gather", 10)
    assert forecast - measured == [Difference("bytes z weight all_gather", 10, 10, 0.0)]


def test_the_words_are_distinct() -> None:
    assert len(set(KINDS)) == len(KINDS) and "control" in KINDS
    assert len(set(MEMORY)) == len(MEMORY) and "activations" in MEMORY
