"""Fixtures for all rooms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Processes


@pytest.fixture(scope="session")
def gloo() -> Iterator[Processes]:
    """`gloo(size, body, *args, timeout=60)`: run a module-level function on real gloo processes, one thread each."""
    processes = Processes()
    yield processes
    processes.close()
