import pytest

from fourfold.ledger import Flow, Ledger
from fourfold.report import tables

MS = 1_000_000


def test_a_split_adds_up_to_the_step(synthetic):
    # three steps of 50 ms; four gathers a step, each exposed 1 ms (rank 1: 2 ms); 1 ms of data
    for rank, exposed in ((0, 0.004), (1, 0.008)):
        found = tables.split(synthetic["measured"](rank, 10))
        assert found is not None and found.steps == 3 and found.seconds == pytest.approx(0.050)
        assert found.parts == pytest.approx(
            {"compute": 0.049 - exposed, "exposed z": exposed, "data": 0.001, "idle": 0}
        )
        assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_idle_is_what_the_schedule_left_open():
    ledger = Ledger(recording=True)
    ledger.span("step", "step 0", 0, 10 * MS)
    ledger.span("compute", "forward", 0, 3 * MS)
    ledger.span("compute", "backward", 4 * MS, 9 * MS)
    ledger.span("wire:data", "all_reduce", 8 * MS, 9 * MS, exposed=MS, bytes=4)
    ledger.span("wire:z", "all_gather", 20 * MS, 30 * MS, exposed=10 * MS, bytes=4)  # after the recorded step
    found = tables.split(ledger)
    assert found is not None
    assert found.parts == pytest.approx({"compute": 0.007, "exposed data": 0.001, "data": 0, "idle": 0.002})


def test_no_spans_no_split():
    assert tables.split(Ledger()) is None


def test_hidden_is_what_did_not_block(synthetic):
    # four gathers of 3 ms in each of three steps; blocked 1 ms of each on rank 0, 2 ms on rank 1
    (row,) = tables.hiding({rank: synthetic["measured"](rank, 10) for rank in range(2)})
    assert row.flow == Flow("z", "weight", "all_gather")
    assert (row.calls, row.seconds, row.exposed) == pytest.approx((4, 0.012, 0.006))
    assert row.hidden == pytest.approx(0.5) and tables.hiding({0: Ledger()}) == []


def test_flows_that_block_longest_come_first():
    ledger = Ledger(recording=True)
    ledger.span("step", "step 0", 0, 10 * MS)
    ledger.span("wire:x", "all_reduce", 0, 4 * MS, kind="activation", exposed=0, bytes=4)
    ledger.span("wire:y", "all_reduce", 0, 2 * MS, kind="activation", exposed=2 * MS, bytes=4)
    ledger.span("wire:y", "all_reduce", 11 * MS, 12 * MS, kind="activation", exposed=MS, bytes=4)  # after the step
    assert [(row.flow.axis, row.hidden) for row in tables.hiding({0: ledger})] == [("y", 0.0), ("x", 1.0)]


def test_matrix_is_of_the_last_step_and_sums_over_ranks(synthetic):
    ledgers = {rank: synthetic["measured"](rank, 10) for rank in range(2)}
    rows = {row.flow: row for row in tables.matrix(ledgers, synthetic["forecast"]())}
    gather = rows[Flow("z", "weight", "all_gather")]
    assert (gather.calls, gather.predicted, gather.measured, gather.total, gather.equal) == (
        4,
        16_000,
        16_000,
        32_000,
        True,
    )
    assert rows[Flow("z+data", "control", "all_gather")].equal is False
    assert Flow("z", "control", "all_gather") not in rows  # traffic outside of steps
    assert tables.matrix(ledgers, None)[0].equal is None and tables.matrix({}, None) == []


def test_memory_and_comparison(synthetic):
    ledgers = {rank: synthetic["measured"](rank, 10) for rank in range(2)}
    forecast = synthetic["forecast"]()
    assert tables.memory(ledgers, forecast)["optimizer"] == [10 << 20, (10 << 20) + 1000, 10 << 20]
    assert list(tables.memory(ledgers, None)) == ["parameters", "optimizer", "activations"]
    forecast.peak("gather buffers", 5)  # not measured: no row, rather than an error of nothing
    rows = {row.what: row for row in tables.comparison(ledgers, forecast)}
    assert rows["bytes z weight all_gather"].error == 0
    assert rows["step seconds"].error == pytest.approx(-0.1)
    assert "memory gather buffers" not in rows and tables.comparison(ledgers, None) == []


def test_a_measured_peak_puts_together_what_a_run_cannot_tell_apart():
    forecast = Ledger(memory={"parameters": 10, "gradients": 3, "optimizer": 20, "activations": 5, "other": 2})
    forecast.notes["memory peak"] = 40.0
    measured = Ledger(memory={"parameters": 10, "gradients": 2, "optimizer": 21}, notes={"memory peak": 44.0})
    found = tables.memory({0: measured}, forecast)
    assert found == {
        "parameters": [10, 10],
        "optimizer": [21, 20],
        "gradients, activations and buffers": [13, 10],
        "peak": [44, 40],
    }
    rows = {row.what: (row.forecast, row.measured) for row in tables.comparison({0: measured}, forecast)}
    assert rows == {f"memory {category}": (told, seen) for category, (seen, told) in found.items()}
