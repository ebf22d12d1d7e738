import runpy
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def synthetic():
    """The names of synthetic.py, by name."""
    return runpy.run_path(str(Path(__file__).with_name("synthetic.py")))


@pytest.fixture
def run_folder(synthetic, tmp_path):
    return synthetic["write_run"](tmp_path / "a run")
