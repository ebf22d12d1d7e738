"""Fixtures of this room."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from fourfold.training import worker


@pytest.fixture(scope="session", autouse=True)
def peak_measured_once() -> Iterator[None]:
    """A run first measures the machine's matrix products (0.5 s): here the first run of each precision does so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "gemm_peak", functools.cache(worker.gemm_peak))
        yield
