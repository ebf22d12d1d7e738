import json

import pytest

from fourfold.ledger import Flow, Ledger


def filled():
    ledger = Ledger(rank=1, recording=True)
    ledger.begin(3)
    ledger.send("z", "gradient", "reduce_scatter", 100)
    ledger.send("z", "gradient", "reduce_scatter", 20, calls=2)
    ledger.begin(4)
    ledger.send("z+data", "control", "all_gather", 8)
    ledger.span("compute", "forward", 10, 30, microbatch=0)
    ledger.peak("activations", 1 << 40)
    ledger.notes["step seconds"] = 0.25
    return ledger


def test_round_trip_through_json():
    ledger = filled()
    back = Ledger.from_dict(json.loads(json.dumps(ledger.to_dict())))
    assert back.to_dict() == ledger.to_dict()
    assert back.sent(3, axis="z") == 120 and back.traffic(3)[Flow("z", "gradient", "reduce_scatter")].calls == 3
    assert (back.spans, back.memory, back.notes, back.step) == (ledger.spans, ledger.memory, ledger.notes, 4)
    back.send("z", "gradient", "reduce_scatter", 1)  # goes on counting where the step stood
    assert back.sent(4) == 9


@pytest.mark.parametrize("damage", [{"rank": None}, {"steps": {"1": {"z/gradient": [1, 2]}}}, {"spans": [["compute"]]}])
def test_what_is_not_a_ledger_is_refused(damage):
    with pytest.raises(ValueError, match="not a ledger"):
        Ledger.from_dict({**filled().to_dict(), **damage})
    with pytest.raises(ValueError, match="not a ledger"):
        Ledger.from_dict({})
