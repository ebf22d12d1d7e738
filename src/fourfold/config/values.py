"""The kinds of value that settings hold: each a type, its bounds, and the words for both."""

from __future__ import annotations

import math
import os.path
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints


@dataclass(frozen=True)
class Words:
    """What a setting holds, in words, for errors and `config explain`; stands beside the constraint that it names."""

    text: str


Count = Annotated[int, Field(ge=1, le=2**62), Words("a whole number of at least 1")]
Whole = Annotated[int, Field(ge=0, le=2**62), Words("a whole number of at least 0")]
Several = Annotated[int, Field(ge=2, le=2**62), Words("a whole number of at least 2")]
Seed = Annotated[int, Field(ge=0, lt=2**63), Words("a whole number of at least 0, below 2**63")]
Ids = Annotated[int, Field(ge=2, le=1 << 31), Words("a whole number from 2 to 2147483648")]
Merges = Annotated[int, Field(ge=257, le=1 << 20), Words("a whole number from 257 to 1048576")]
Positive = Annotated[float, Field(gt=0), Words("a finite number above 0")]
NotNegative = Annotated[float, Field(ge=0), Words("a finite number of at least 0")]
Half = Annotated[float, Field(ge=0, le=0.5), Words("a number from 0 to 0.5")]
Share = Annotated[float, Field(ge=0, lt=1), Words("a number of at least 0 and below 1")]
Fraction = Annotated[float, Field(ge=0, le=1), Words("a number from 0 to 1")]
Betas = Annotated[
    tuple[Share, Share], Field(strict=False), Words("a list of two numbers, each of at least 0 and below 1")
]
Text = Annotated[str, StringConstraints(min_length=1), Words("text that is not empty")]
Location = Annotated[
    str, StringConstraints(min_length=1), AfterValidator(os.path.expanduser), Words("a path that is not empty")
]
Files = Annotated[
    tuple[Location, ...], Field(min_length=1, strict=False), Words("a list of at least one path or pattern")
]
Settings = Annotated[dict[str, Any], Words("settings (lines of key: value)")]
FolderName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*$", max_length=120),
    Words("a folder's name: letters, digits and _ . + -, not beginning with a dot, at most 120 of them"),
]
Address = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_.:\[\]-]+:[0-9]{1,5}$"),
    AfterValidator(lambda address: _port(address)),
    Words("host:port, with a port from 1 to 65535"),
]
Norm = Annotated[Literal[2, "inf"], BeforeValidator(lambda value: _norm(value)), Words("2 or inf")]


def _port(address: str) -> str:
    if not 0 < int(address.rpartition(":")[2]) < 65536:
        raise ValueError("a port from 1 to 65535")
    return address


def _norm(value: Any) -> Any:
    """Infinity may be written as the word or as the number."""
    return "inf" if isinstance(value, float) and value == math.inf else value
