"""What one processor reaches here: the rate of a large matrix product, and of a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

GEMM = {torch.float32: 1024, torch.float64: 768, torch.bfloat16: 256}
"""Size of the square matrices: large enough for the peak, small enough for milliseconds (bf16 may be emulated)."""


SECONDS = 0.3
"""How long one figure is measured, at least three runs."""


def gemm(dtype: torch.dtype, threads: int) -> float:
    """FLOP/s of a square matrix product, the best of as many as SECONDS allow (at least three)."""
    size = GEMM[dtype]
    left, right = (torch.rand(size, size, dtype=torch.float32).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype)
    with _threads(threads):
        return 2 * size**3 / _best(lambda: torch.mm(left, right, out=out))


def copy(threads: int, nbytes: int = 1 << 27) -> float:
    """Bytes/s that cross the memory bus in a copy of `nbytes`: each byte is read once and written once."""
    source = torch.zeros(nbytes // 4, dtype=torch.int32)
    target = torch.zeros_like(source)
    with _threads(threads):
        return 2 * nbytes / _best(lambda: target.copy_(source))


def _best(work: Callable[[], object]) -> float:
    """The shortest run: on a busy machine the others measure the neighbours."""
    work()
    best, begin, runs = float("inf"), perf_counter(), 0
    while runs < 3 or perf_counter() - begin < SECONDS:
        start = perf_counter()
        work()
        best = min(best, perf_counter() - start)
        runs += 1
    return best


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
