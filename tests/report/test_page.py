import json
import re
from html.parser import HTMLParser

import pytest

from fourfold.ledger import Difference
from fourfold.report import ReportError, off, write

SECTIONS = ["loss", "time", "bytes", "memory", "forecast", "exactness", "sample", "machine", "journal", "config"]


class Page(HTMLParser):
    """Tags, their balance, what they point at, and the text."""

    VOID = {"meta", "link", "br"}

    def __init__(self, text):
        super().__init__()
        self.open, self.sections, self.addresses, self.scripts, self.words = [], [], [], 0, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.scripts += tag == "script"
        self.sections += [found["id"]] if tag == "section" else []
        self.addresses += [found[name] for name in ("href", "src", "xlink:href") if name in found]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        """An element of SVG without content: neither opened nor closed."""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def page_of(folder):
    text = write(folder).path.read_text(encoding="utf-8")
    return text, Page(text)


def test_every_section_is_there_and_nothing_points_outside(run_folder):
    text, page = page_of(run_folder)
    assert page.open == [] and page.sections == SECTIONS
    assert page.addresses == ["data:,"] and page.scripts == 0
    assert not re.search(r"https?://|url\(|@import", text)


def test_what_a_run_says_cannot_break_the_page(run_folder, synthetic):
    text, page = page_of(run_folder)
    assert synthetic["HOSTILE"] not in text and text.count("&lt;script&gt;") == 2
    assert synthetic["HOSTILE"] in "".join(page.words)


def test_figures(run_folder):
    report = write(run_folder)
    assert report.facts | {"tokens/s": ""} == {
        "state": "finished",
        "plan": "z 2 shard parameters, accumulate 2",
        "ranks": "2",
        "parameters": "1.235M",
        "steps": "120",
        "loss": "2.7492",
        "tokens/s": "",
        "MFU": "31.0%",
        "time in steps": "6.0 s",
        "validation loss": "2.9391",
    }
    words = re.sub(r"\s+", " ", " ".join(Page(report.path.read_text()).words))
    assert "exact : it computes what one process computes" in words
    assert "16,000 16,000 = 31.25 KiB" in words  # predicted, measured, equal, over both ranks
    assert "48 40 ≠" in words
    assert "step seconds 45.0 ms 50.0 ms 10.0% too low" in words
    assert "equal to serial: worst difference 3.1e-16" in words


def test_what_hides_and_how_matrices_are_multiplied(run_folder):
    choice = {"rows": 2048, "columns": 576, "depth": 384, "layouts": "NT", "dtype": "float32", "device": "cpu"}
    choice |= {"way": "NN", "seconds": 0.005, "plain": 0.008, "gain": 1.6}
    with (run_folder / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps({"kind": "kernels", "step": 1, "choices": [choice]}) + "\n")
    _, page = page_of(run_folder)
    words = re.sub(r"\s+", " ", " ".join(page.words))
    assert "z weight all_gather 4 12.0 ms 6.0 ms 50 %" in words
    assert "2048 576 384 NT float32 NN 8.0 ms 5.0 ms 1.60 ×" in words


def test_text_and_json(run_folder):
    report = write(run_folder)
    assert "memory activations: 6.00 MiB, measured 7.00 MiB (14.3% too low)\n" in report.text()
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["ok"] and plain["report"].endswith("report.html") and plain["facts"]["steps"] == "120"


@pytest.mark.parametrize(
    ("forecast", "measured", "words"),
    [
        (6.0, 6.0, "exact"),
        (9.0, 8.0, "12.5% too high"),
        (7.0, 8.0, "12.5% too low"),
        (9999.0, 10000.0, "less than 0.1% off"),
        (1.0, 0.0, "nothing measured"),
    ],
)
def test_which_way_a_forecast_is_off_is_said_in_words(forecast, measured, words):
    error = (forecast - measured) / measured if measured else None
    assert off(Difference("step seconds", forecast, measured, error)) == words


def test_a_run_that_was_cut_short(tmp_path):
    (tmp_path / "journal.jsonl").write_text('{"kind": "step", "step": 1, "loss": 3.0}\n{"kind": "st')
    report = write(tmp_path)
    text, page = page_of(tmp_path)
    assert report.facts["state"] == "not finished" and report.facts["loss"] == "3.0000" and report.trace is None
    assert page.sections == SECTIONS and "exactness unknown" in text and "No spans were recorded" in text


def test_an_empty_journal(tmp_path):
    (tmp_path / "journal.jsonl").write_text("")
    text, page = page_of(tmp_path)
    assert page.sections == SECTIONS and "No step was journalled" in text


@pytest.mark.parametrize("damage", ["{", "[]", '{"rank": 0}'])
def test_what_is_no_run_folder_is_refused(run_folder, damage, tmp_path):
    with pytest.raises(ReportError, match=r"found no journal\.jsonl; name a folder that train wrote"):
        write(tmp_path / "nothing")
    (run_folder / "ledger" / "rank-0.json").write_text(damage)
    with pytest.raises(ReportError, match="cannot be read as a run folder"):
        write(run_folder)


def test_control_traffic_is_predicted_by_the_formulas_of_the_run(run_folder, synthetic):
    formulas = synthetic["forecast"]()
    formulas.send("z+data", "control", "all_gather", -8)
    formulas.send("z", "weight", "all_gather", 1)  # the planner has said something of weights: that stands
    (run_folder / "ledger" / "formulas.json").write_text(json.dumps(formulas.to_dict()))
    rows = {row.what: row for row in write(run_folder).differences}
    assert rows["bytes z+data control all_gather"][1:3] == (40, 40)
    assert rows["bytes z weight all_gather"][1:3] == (16_000, 16_000)
    (run_folder / "ledger" / "forecast.json").unlink()
    rows = {row.what: row for row in write(run_folder).differences}
    assert rows["bytes z weight all_gather"][1:3] == (16_001, 16_000)


@pytest.mark.parametrize(("worst", "says"), [(0.049, "outside"), (0.051, "inside")])
def test_the_time_forecast_is_held_against_its_interval(run_folder, synthetic, worst, says):
    forecast = synthetic["forecast"]()
    forecast.notes |= {"step seconds at best": 0.04, "step seconds at worst": worst}
    (run_folder / "ledger" / "forecast.json").write_text(json.dumps(forecast.to_dict()))
    words = " ".join(" ".join(Page(write(run_folder).path.read_text()).words).split())
    assert f"the median step took 50.0 ms, {says} that interval" in words


def test_random_numbers_that_no_plan_makes_equal_are_shown(run_folder):
    line = "noise calls rand_like, which draws from torch's own generator"
    path = run_folder / "journal.jsonl"
    start, *rest = path.read_text(encoding="utf-8").splitlines()
    assert ">exact</span>" in page_of(run_folder)[0]
    path.write_text("\n".join([json.dumps(json.loads(start) | {"inexact": [line]}), *rest, ""]), encoding="utf-8")
    page = page_of(run_folder)[0]
    assert "noise calls rand_like" in page and ">inexact</span>" in page and ">exact</span>" not in page
