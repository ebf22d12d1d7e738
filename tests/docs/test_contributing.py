"""The worked examples of CONTRIBUTING.md are taken out of the page, put where they belong, and run."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import ModuleType

import pytest

from docs.blocks import ROOT, Block, all_blocks
from fourfold.plan import techniques

FILES = {b.marks["file"]: b for b in all_blocks() if b.document == "CONTRIBUTING.md" and "file" in b.marks}
TECHNIQUES = {path: block for path, block in FILES.items() if path.startswith("src/")}
TESTS = {path: block for path, block in FILES.items() if path.startswith("tests/")}
ROOMS = {"src/fourfold/wire/codecs": "codec", "src/fourfold/schedule/orders": "schedule", "src/fourfold/sync": "sync"}


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each technique's file lies in a folder that its package searches last."""
    folders: list[tuple[ModuleType, str]] = []
    for path, block in TECHNIQUES.items():
        name = ".".join(PurePosixPath(path).parent.parts[1:])
        package = importlib.import_module(name)
        folder = tmp_path_factory.mktemp("room")
        (folder / PurePosixPath(path).name).write_text(block.text)
        package.__path__.append(str(folder))
        folders.append((package, str(folder)))
    importlib.invalidate_caches()
    yield
    for package, folder in folders:
        package.__path__.remove(folder)


def _load(path: str, block: Block, folder: Path) -> ModuleType:
    file = folder / PurePosixPath(path).name
    file.write_text(block.text)
    spec = importlib.util.spec_from_file_location(f"contributing.{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_an_example_of_each_kind() -> None:
    assert {ROOMS[str(PurePosixPath(path).parent)] for path in TECHNIQUES} == set(ROOMS.values())
    assert len(TESTS) == len(TECHNIQUES)


@pytest.mark.parametrize("path", TECHNIQUES)
def test_the_technique_is_found_by_its_file_name(path: str) -> None:
    assert PurePosixPath(path).stem in techniques(ROOMS[str(PurePosixPath(path).parent)])


@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=lambda command: command[0])
def test_the_examples_keep_the_house_style(path: str, command: list[str]) -> None:
    arguments = [sys.executable, "-m", "ruff", *command, "--no-cache", "--stdin-filename", path, "-"]
    done = subprocess.run(arguments, cwd=ROOT, input=FILES[path].text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", TESTS)
def test_the_example_tests_pass(path: str, tmp_path: Path) -> None:
    module = _load(path, TESTS[path], tmp_path)
    names = [name for name in vars(module) if name.startswith("test_")]
    assert names
    for name in names:
        getattr(module, name)()
