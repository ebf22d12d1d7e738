"""Sizes in the unit that suits them."""

import pytest

from fourfold.planner.units import in_bytes, in_seconds


@pytest.mark.parametrize(
    ("value", "said"),
    [(3, "3 B"), (1024, "1.00 KiB"), (12 * 1024**2 + 2**19, "12.50 MiB"), (3 * 1024**3, "3.00 GiB")],
)
def test_bytes(value: int, said: str) -> None:
    assert in_bytes(value) == said


def test_seconds() -> None:
    assert (in_seconds(0.0123), in_seconds(2)) == ("12.3 ms", "2.00 s")
