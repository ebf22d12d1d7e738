"""Every recipe's claim, and what a claim is worth."""

import json

import pytest

from fourfold import recipes
from fourfold.recipes._claim import Claim, judge


@pytest.mark.parametrize("name", recipes.names())
def test_claim_holds_and_its_control_fails(name):
    result = recipes.reproduce([name])
    assert result.ok, result.text()
    plain = json.loads(json.dumps(result.to_dict()))["recipes"][0]
    assert {"paper", "claim", "predicted", "measured", "control", "verdict"} <= plain.keys()


def claim(measured, control, **settings):
    words = {"system": "s", "paper": "p", "statement": "x doubles", "off": "nothing doubles"}
    return judge(
        "made", Claim(**words, predicted={"x": 2.0}, measure=lambda: measured, control=lambda: control, **settings)
    )


def test_a_claim_needs_its_figure_and_a_control_that_fails():
    assert claim({"x": 2.0}, {"x": 1.0}).ok
    wrong = claim({"x": 2.1}, {"x": 1.0})
    assert not wrong.ok and wrong.verdict == "does NOT hold: x"
    idle = claim({"x": 2.0}, {"x": 2.0})
    assert not idle.ok and idle.verdict.startswith("decides nothing")
    assert not claim({}, {"x": 1.0}).ok
    assert not claim({"x": float("nan")}, {"x": 1.0}, tolerance=0.1).ok
    assert claim({"x": 2.1}, {"x": 1.0}, tolerance=0.1).ok


def test_text_shows_prediction_measurement_and_control():
    text = claim({"x": 2.0}, {"x": 1.0}).text()
    assert "x doubles" in text and "control: nothing doubles" in text and "holds; the control fails" in text


def test_what_cannot_be_run_here_stands_beside_and_is_not_judged():
    result = claim({"x": 2.0}, {"x": 1.0}, beside=lambda: {"faster, %": (26.0, 22.125)})
    assert result.ok
    [line] = [line for line in result.text().splitlines() if "faster" in line]
    assert line.split() == ["faster,", "%", "26", "22.1"]
    assert result.to_dict()["beside"] == {"faster, %": {"published": 26.0, "model": 22.125}}
    assert "not judged" not in claim({"x": 2.0}, {"x": 1.0}).text()


def test_names_are_files_and_unknown_ones_are_refused():
    assert {"data_parallel", "selective_recompute", "zero"} <= set(recipes.names())
    assert not any(name.startswith("_") for name in recipes.names())
    with pytest.raises(ValueError, match="no recipe is called 'zoro'; there are: .*data_parallel"):
        recipes.reproduce(["zoro"])
