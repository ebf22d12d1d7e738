"""Drawings of the orders with several stages or copies a worker, and frozen figures outside of known conditions."""

from fractions import Fraction
from importlib import import_module
from inspect import getdoc

import pytest

from schedule.laying import EVEN, measure, staircase

DRAWN = {
    "zb_v": (2, 3, EVEN),
    "v_half": (3, 2, EVEN),
    "v_min": (3, 2, EVEN),
    "hanayo": (3, 3, (1, 1)),
    "chimera": (4, 4, (1, 1)),
    "dualpipe": (4, 8, EVEN),
    "dualpipev": (2, 4, EVEN),
}


@pytest.mark.parametrize("name", DRAWN)
def test_the_drawing_in_the_docstring_is_the_simulators(name):
    text = getdoc(import_module(f"fourfold.schedule.orders.{name}"))
    assert text is not None and text.split("```")[1].lstrip() == staircase(name, *DRAWN[name])


FROZEN = [
    # fewer than 2 p - 1 micro-batches do not fill it
    (
        "zb_v",
        3,
        2,
        EVEN,
        "3",
        """
0 | F0.0 F0.1 .    .    .    F5.0 I5.0 W5.0 F5.1 I5.1 W5.1 .    .    I0.0 W0.0 .    I0.1 W0.1 U    U
1 | .    F1.0 F1.1 .    F4.0 .    F4.1 I4.0 W4.0 .    I4.1 W4.1 I1.0 W1.0 .    I1.1 W1.1 U    U    .
2 | .    .    F2.0 F3.0 F2.1 F3.1 .    .    I3.0 W3.0 I2.0 W2.0 I3.1 W3.1 I2.1 W2.1 U    U    .    .
""",
    ),
    # p < 4
    (
        "v_half",
        2,
        3,
        EVEN,
        "1/2",
        """
0 | F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I0.0 I3.1 W0.0 W3.1 F3.2 I3.2 I0.1 W0.1 I0.2 W3.2 W0.2 U    U    .
1 | .    F1.0 F2.0 F1.1 F2.1 I2.0 I1.0 W2.0 W1.0 F1.2 F2.2 I2.1 I1.1 I2.2 I1.2 W2.1 W1.1 W2.2 W1.2 U    U
""",
    ),
    # p odd
    (
        "v_half",
        3,
        2,
        EVEN,
        "3",
        """
0 | F0.0 F0.1 .    .    .    F5.0 I5.0 W5.0 .    .    F5.1 I5.1 I0.0 W0.0 W5.1 .    I0.1 W0.1 U    U
1 | .    F1.0 F1.1 .    F4.0 .    .    I4.0 W4.0 F4.1 I1.0 W1.0 I4.1 W4.1 .    I1.1 W1.1 U    U    .
2 | .    .    F2.0 F3.0 F2.1 F3.1 .    .    I3.0 I2.0 W3.0 W2.0 .    I3.1 I2.1 W3.1 W2.1 U    U    .
""",
    ),
    # p does not divide m
    (
        "hanayo",
        2,
        3,
        (1, 1),
        "2",
        """
0 | F0.0 F0.1 .    F3.0 B3.0 F3.1 B3.1 B0.0 F0.2 B0.1 .    F3.2 B3.2 .    .    B0.2 U    U
1 | .    F1.0 F2.0 F1.1 F2.1 B2.0 B1.0 B2.1 B1.1 F1.2 F2.2 .    .    B2.2 B1.2 U    U    .
""",
    ),
    # B = 2 F beyond m = p
    (
        "hanayo",
        2,
        3,
        (1, 2),
        "7/2",
        """
0 | F0.0 F0.1 .    F3.0 B3.0 --   F3.1 B3.1 --   .    B0.0 --   F0.2 .    B0.1 --   F3.2 B3.2 --   .    .    .    .    B0.2 --   U    U
1 | .    F1.0 F2.0 F1.1 F2.1 .    B2.0 --   B1.0 --   B2.1 --   B1.1 --   F1.2 F2.2 .    .    .    B2.2 --   B1.2 --   U    U    .    .
""",  # noqa: E501
    ),
    # p does not divide m
    (
        "chimera",
        4,
        6,
        (1, 1),
        "4",
        """
0 | F0.0 F0.2 .    F3.1 B3.1 F3.3 B3.3 B0.0 F0.4 B0.2 .    F3.5 B3.5 R3.1 .    B0.4 U    U
1 | .    F1.0 F2.1 F1.2 F2.3 B2.1 B1.0 B2.3 B1.2 F1.4 F2.5 .    .    B2.5 B1.4 U    U    .
2 | .    F1.1 F2.0 F1.3 F2.2 B2.0 B1.1 B2.2 B1.3 F1.5 F2.4 .    .    B2.4 B1.5 U    U    .
3 | F0.1 F0.3 .    F3.0 B3.0 F3.2 B3.2 B0.1 F0.5 B0.3 .    F3.4 B3.4 R3.0 .    B0.5 U    U
""",
    ),
    # B = 2 F beyond m = p
    (
        "chimera",
        4,
        8,
        (1, 2),
        "6",
        """
0 | F0.0 F0.2 .    F3.1 B3.1 --   F3.3 B3.3 --   .    B0.0 --   F0.4 .    B0.2 --   F0.6 F3.5 B3.5 --   F3.7 B3.7 --   R3.1 B0.4 --   .    .    B0.6 --   U    U
1 | .    F1.0 F2.1 F1.2 F2.3 .    B2.1 --   B1.0 --   B2.3 --   B1.2 --   F1.4 F2.5 .    F1.6 F2.7 .    B2.5 --   B1.4 --   B2.7 --   B1.6 --   U    U    .    .
2 | .    F1.1 F2.0 F1.3 F2.2 .    B2.0 --   B1.1 --   B2.2 --   B1.3 --   F1.5 F2.4 .    F1.7 F2.6 .    B2.4 --   B1.5 --   B2.6 --   B1.7 --   U    U    .    .
3 | F0.1 F0.3 .    F3.0 B3.0 --   F3.2 B3.2 --   .    B0.1 --   F0.5 .    B0.3 --   F0.7 F3.4 B3.4 --   F3.6 B3.6 --   R3.0 B0.5 --   .    .    B0.7 --   U    U
""",  # noqa: E501
    ),
    # B < F
    (
        "chimera",
        4,
        4,
        (2, 1),
        "4",
        """
0 | F0.0 --   F0.2 --   .    .    F3.1 --   B3.1 .    F3.3 --   B3.3 B0.0 .    B0.2 U    U
1 | .    .    F1.0 --   F2.1 --   F1.2 --   F2.3 --   B2.1 B1.0 .    B2.3 B1.2 U    U    .
2 | .    .    F1.1 --   F2.0 --   F1.3 --   F2.2 --   B2.0 B1.1 .    B2.2 B1.3 U    U    .
3 | F0.1 --   F0.3 --   .    .    F3.0 --   B3.0 .    F3.2 --   B3.2 B0.1 .    B0.3 U    U
""",
    ),
]


@pytest.mark.parametrize(("name", "p", "m", "times", "excess", "drawing"), FROZEN)
def test_frozen_beyond_the_conditions(name, p, m, times, excess, drawing):
    assert measure(name, p, m, times).excess == Fraction(excess)
    assert staircase(name, p, m, times) == drawing.lstrip()
