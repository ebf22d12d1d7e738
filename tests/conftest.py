"""Fixtures for all rooms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from ranks import Processes

# No test asserts a time; Hypothesis would: 200 ms an example, and seconds to draw them, which a busy machine exceeds.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.fixture(scope="session")
def gloo() -> Iterator[Processes]:
    """`gloo(size, body, *args, timeout=60)`: run a module-level function on real gloo processes, one thread each."""
    processes = Processes()
    yield processes
    processes.close()
