"""Weights as hypothesis draws them for layouts and arenas."""

from __future__ import annotations

from hypothesis import strategies as st

from fourfold.placement.layout import FROZEN

Weights = list[tuple[str, tuple[int, ...], str]]

shapes = st.lists(st.sampled_from([1, 2, 3, 5, 7, 16, 17, 33]), max_size=3).map(tuple)
"""No dims, one row, fewer rows than ranks, odd widths, widths of a line."""


def _named(listed: list[tuple[tuple[int, ...], str]]) -> Weights:
    return [(f"w{index}", shape, group) for index, (shape, group) in enumerate(listed)]


weights = st.lists(st.tuples(shapes, st.sampled_from(["decay", "plain", FROZEN])), min_size=1, max_size=5).map(_named)
"""(name, shape, group) of the weights of one unit."""
