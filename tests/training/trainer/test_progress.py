"""What a person sees."""

import io

from rich.console import Console

from fourfold.training.progress import Bar, Plain, TimeLeft, busy, measures, screen, words

STEP = {"kind": "step", "loss": 2.34567, "tokens_per_second": 12345.6, "mfu": 0.5123, "memory": 300 * 2**20}


def test_the_measures_of_a_step_on_one_line():
    assert measures(STEP) == "loss 2.3457  12,346 tokens/s  MFU 51%  process 300 MiB"
    assert measures({"loss": 1.0, "mfu": None}) == "loss 1.0000"


def test_plain_lines_are_few_and_hold_the_first_and_the_last():
    lines = []
    plain = Plain(100, lines.append)
    for step in range(1, 101):
        plain.show(STEP | {"step": step})
    assert len(lines) == 21
    assert lines[0].startswith("step 1/100  loss")
    assert lines[-1].startswith("step 100/100  loss")
    assert " left" in lines[5]
    assert " left" not in lines[-1]


def test_what_is_waited_for_is_told_on_one_line_of_a_terminal_and_taken_away():
    out = io.StringIO()
    with busy("looking at plans", Console(file=out, force_terminal=True, color_system=None, width=40)) as tell:
        tell("plan 2 of 3, data 2")
        tell("plan 3 of 3, a name that is longer than what is left")
    lines = out.getvalue().split("\r")
    assert [line.rstrip() for line in lines] == [
        "looking at plans …",
        "looking at plans: plan 2 of 3, data 2 …",
        "looking at plans: plan 3 of 3, a name t",
        "",
        "",
    ]
    assert {len(line) for line in lines[:-1]} == {39}


def test_what_is_waited_for_is_not_told_on_a_pipe():
    out = io.StringIO()
    with busy("looking at plans", Console(file=out)) as tell:
        tell("plan 2 of 3")
    assert out.getvalue() == ""


def test_other_records_are_told_in_words():
    assert words({"kind": "evaluation", "step": 5, "loss": 1.25, "count": 2048}) == (
        "step 5  validation loss 1.2500  (2,048 tokens)"
    )
    assert words({"kind": "checkpoint", "step": 5, "path": "runs/a"}) == "step 5  saved runs/a"
    assert words({"kind": "resume", "step": 5, "path": "runs/a"}) == "resumed at step 5 from runs/a"
    assert words({"kind": "resume", "step": 0, "path": None}) == "started again at step 0"
    assert words({"kind": "end", "step": 5, "sample": "def f"}) == "sample:\ndef f"
    assert words({"kind": "start", "step": 0}) == ""


def test_kernels_are_told_in_one_line():
    choices = [{"layouts": "NT", "way": "NT"}, {"layouts": "TN", "way": "NN"}]
    assert words({"kind": "kernels", "step": 1, "choices": choices}).startswith("kernels: 1 of 2 products")


def test_time_left_is_the_pace_so_far():
    now = [100.0]
    left = TimeLeft(50, clock=lambda: now[0])
    assert left.after(10) is None
    now[0] = 120.0
    assert left.after(20) == 60.0
    assert left.after(5) is None  # resumed further back: the pace begins anew


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines():
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True)
    bar = screen(10, terminal)
    assert isinstance(bar, Bar)
    bar.show(STEP | {"step": 3})
    bar.show({"kind": "evaluation", "step": 3, "loss": 1.0, "count": 1})
    bar.close()
    assert "3/10" in written.getvalue()
    assert "validation loss 1.0000" in written.getvalue()
    piped = io.StringIO()
    pipe = Console(file=piped, width=40)
    plain = screen(10, pipe)
    plain.show({"kind": "end", "step": 3, "sample": "[not] markup " * 9})
    assert "[not] markup " * 9 in piped.getvalue()


def test_control_characters_of_a_sample_never_reach_the_terminal():
    shown = words({"kind": "end", "step": 1, "sample": "a\x1b[31mb\tc\nd\x00"})
    assert shown == "sample:\na\N{REPLACEMENT CHARACTER}[31mb\tc\nd\N{REPLACEMENT CHARACTER}"
