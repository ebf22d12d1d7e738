"""Streams of random numbers that are addressed by index.

A *site* is a place that draws (a parameter's initialiser, a dropout). Every site is a stream of Philox4x64-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by (seed, 64-bit hash of the site) with
the counter (block, step, use, 0). Any slice of a stream equals the slice of the whole: a rank draws just the elements
that it holds.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

# Third word of the counter: each use of a site has its own stream.
_LANES_USE, _UNIFORM_USE, _PERMUTATION_USE = 0, 1, 2


class RandomnessError(ValueError):
    """A draw that has no logical meaning: a seed out of range, or a tensor whose rows cannot be told."""


@cache
def hash64(site: str) -> int:
    """The 64 bits by which a stream knows its site."""
    return int.from_bytes(blake2b(site.encode(), digest_size=8).digest(), "little")


def _words(seed: int, site: str, step: int, use: int, start: int, count: int) -> np.ndarray:
    """Words [start, start + count) of a stream, uint64; four words share a counter."""
    if not 0 <= seed < 1 << 64:
        raise RandomnessError(f"seed {seed} at site {site!r}: expected 0 ≤ seed < 2**64; choose a non-negative seed")
    if start < 0 or count < 0 or step < 0:
        raise RandomnessError(f"site {site!r}: start {start}, count {count}, step {step} must not be negative")
    block, skip = divmod(start, 4)
    key = np.array([seed, hash64(site)], dtype=np.uint64)
    counter = np.array([block, step, use, 0], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(skip + count)[skip:]


def bits(seed: int, site: str, step: int, start: int, count: int) -> np.ndarray:
    """Lanes [start, start + count) of the site's stream in this step: uint16, each uniform on 0 … 65535."""
    word, skip = divmod(start, 4)
    words = _words(seed, site, step, _LANES_USE, word, (skip + count + 3) // 4)
    return words.astype("<u8", copy=False).view("<u2")[skip : skip + count]


def _unit(seed: int, site: str, start: int, count: int) -> np.ndarray:
    """Multiples of 2⁻⁵³ in [0, 1), float64: one word an element."""
    return (_words(seed, site, 0, _UNIFORM_USE, start, count) >> np.uint64(11)) * 2.0**-53


def uniform(seed: int, site: str, start: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Elements [start, start + count) of the site's uniform stream on [0, 1): float64, then rounded to `dtype`."""
    return torch.from_numpy(_unit(seed, site, start, count)).to(dtype)


def normal(seed: int, site: str, start: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Elements [start, start + count) of the site's standard normal stream: inverse CDF in float64, rounded to `dtype`.

    A ziggurat cannot be addressed by index (it rejects); the inverse CDF can. Values lie within ±8.3: the uniforms are
    moved to the middle of their cells, so that neither 0 nor 1 is ever inverted.
    """
    middle = np.minimum(_unit(seed, site, start, count) + 2.0**-54, 1 - 2.0**-53)
    return torch.special.ndtri(torch.from_numpy(middle)).to(dtype)


def permutation(seed: int, site: str, count: int) -> np.ndarray:
    """A permutation of range(count), int64: the ranks of `count` words, so that it does not hang on numpy's version."""
    return np.argsort(_words(seed, site, 0, _PERMUTATION_USE, 0, count), kind="stable")
