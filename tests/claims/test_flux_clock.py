"""What the claim of `flux_overlap` is read off: its clock, and its eye for tiles that come too early."""

from __future__ import annotations

import pytest

from fourfold.recipes.flux_overlap import Event, ahead, elapsed

WHOLE = [Event("send", 0, 1), Event("signal", 0, 0), Event("tile", 0, 1, 0)]


def halves(first: str, then: str) -> list[Event]:
    """Two chunks: all is sent at the beginning; each tile waits for its own."""
    tiles = [Event(what, chunk, 1, 0) for chunk in (0, 1) for what in (first, then)]
    return [Event("send", 0, 1), Event("send", 1, 1), *tiles]


def test_what_comes_after_its_signal_takes_both_times() -> None:
    assert elapsed([WHOLE, WHOLE], multiplying=3.0, sending=2.0) == 5.0


@pytest.mark.parametrize(("multiplying", "sending", "seconds"), [(4.0, 2.0, 5.0), (2.0, 4.0, 5.0), (2.0, 2.0, 3.0)])
def test_two_chunks_hide_all_but_half_of_the_shorter(multiplying: float, sending: float, seconds: float) -> None:
    events = halves("signal", "tile")
    assert elapsed([events, events], multiplying=multiplying, sending=sending) == seconds


def test_a_collective_begins_when_the_last_rank_has_come_to_it() -> None:
    late = [Event("tile", -1, 1, 0), *WHOLE]
    early = [*WHOLE, Event("tile", -1, 1, 0)]
    assert elapsed([early, late], multiplying=2.0, sending=2.0) == 5.0


def test_a_tile_ahead_of_its_signal_is_seen() -> None:
    assert ahead(halves("signal", "tile")) == 0
    assert ahead(halves("tile", "signal")) == 2
    assert ahead([Event("tile", 0, 1, 0), Event("send", 0, 1)]) == 0, "a chunk that leaves after its tile"
    assert ahead([Event("send", 0, 1), Event("tile", 0, 1, 0)]) == 1, "a chunk that has left before its tile"
