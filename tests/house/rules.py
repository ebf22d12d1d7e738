"""The house rules that no linter knows, each a function from one file to the places where it breaks the rule.

Print, pickle, eval and docstrings are ruff's; the layers are import-linter's. `test_rules.py` runs these over the
tree, and each over a sample that breaks it.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Source:
    """One file of the tree: its path from the repository's root, with slashes, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file (Python files only)."""
        return ast.parse(self.text, self.path)

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What each imported name stands for: {"dist": "torch.distributed", "F": "torch.nn.functional"}."""
        names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for entry in node.names:
                    first = entry.name.split(".")[0]
                    names[entry.asname or first] = entry.name if entry.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= {entry.asname or entry.name: f"{node.module}.{entry.name}" for entry in node.names}
        return names

    def uses(self) -> Iterator[tuple[int, str]]:
        """Every dotted name that the file imports or reaches through an import, in full, with its line."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, entry.name) for entry in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield from ((node.lineno, f"{node.module}.{entry.name}") for entry in node.names)
            elif isinstance(node, ast.Attribute):
                dotted = _dotted(node)
                if dotted and dotted[0] in self.aliases:
                    yield node.lineno, ".".join([self.aliases[dotted[0]], *dotted[1:]])


def _dotted(node: ast.expr) -> list[str]:
    """["a", "b", "c"] for the expression a.b.c; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id, *parts] if isinstance(node, ast.Name) else []


def tracked() -> list[Source]:
    """Every text file that git tracks, or would (new files that it does not ignore)."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    found = []
    for path in listed:
        file = ROOT / path
        if file.is_file() and b"\0" not in (content := file.read_bytes()):
            found.append(Source(path, content.decode()))
    return found


# -- what may be reached from where


def private_torch(source: Source) -> Iterator[str]:
    """Private torch names are imported by torch_private.py alone, where a contract test holds each of them."""
    if source.path == "src/fourfold/torch_private.py":
        return
    for line, name in source.uses():
        first, *rest = name.split(".")
        if first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest):
            yield f"{source.path}:{line}: {name} is private; put it into torch_private.py with a contract test"


def communication(source: Source) -> Iterator[str]:
    """Only `wire` talks to other ranks. Checkpoint planning is not talking, nor is the elastic agent of `training`."""
    if source.path.startswith("src/fourfold/wire/") or source.path == "src/fourfold/torch_private.py":
        return
    supervises = source.path.startswith("src/fourfold/training/")
    for line, name in source.uses():
        if not f"{name}.".startswith("torch.distributed."):
            continue
        part = f"{name}..".split(".")[2]
        planning = part in ("checkpoint", "")  # "" is `import torch.distributed`, judged by what is reached from it
        if not planning and not (supervises and part in ("elastic", "launcher")):
            yield f"{source.path}:{line}: {name} outside of wire/"


def plain_models(source: Source) -> Iterator[str]:
    """A model is plain PyTorch: it imports torch, the standard library's typing aids, and its siblings in models/."""
    allowed = ("torch", "__future__", "math", "dataclasses", "typing", "collections", "functools", "fourfold.models")
    for line, name in source.uses():
        if not any(f"{name}.".startswith(f"{one}.") for one in allowed):
            yield f"{source.path}:{line}: a model that imports {name}"


# -- size and names


FILE_LINES, FUNCTION_LINES = 500, 60
LONGER: dict[str, str] = {}
"""Files and functions that may be longer ("src/….py" or "src/….py:name"), each with the reason."""


def file_size(source: Source) -> Iterator[str]:
    """A file has at most 500 lines."""
    lines = source.text.count("\n")
    if lines > FILE_LINES and source.path not in LONGER:
        yield f"{source.path}: {lines} lines; at most {FILE_LINES}"


def function_size(source: Source) -> Iterator[str]:
    """A function has at most 60 lines, docstring included."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES and f"{source.path}:{node.name}" not in LONGER:
                yield f"{source.path}:{node.lineno}: {node.name} has {lines} lines; at most {FUNCTION_LINES}"


def one_noun(source: Source) -> Iterator[str]:
    """A file is named after what it holds, never after the fact that it holds several things."""
    if PurePosixPath(source.path).stem.strip("_") in ("utils", "util", "common", "helpers", "helper", "misc", "tools"):
        yield f"{source.path}: name the file after the one thing that it holds"


# -- honesty


_PATHS = re.compile(r"(?:^|(?<=[^\w.\-]))/(?:work|farm|root|tmp|opt)/\w", re.MULTILINE)


def machine_paths(source: Source) -> Iterator[str]:
    """Nothing committed names a folder of the machine on which it was written."""
    for found in _PATHS.finditer(source.text):
        line = source.text.count("\n", 0, found.start()) + 1
        yield f"{source.path}:{line}: a path of one machine, {found.group()}…"


_UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b|\bNotImplementedError\b")


def finished(source: Source) -> Iterator[str]:
    """No stubs and no notes to self: what is not done is in an issue."""
    for number, line in enumerate(source.text.splitlines(), start=1):
        if found := _UNFINISHED.search(line):
            yield f"{source.path}:{number}: {found.group()}"


def runs(source: Source) -> Iterator[str]:
    """No test is skipped or expected to fail: a test that does not run shows nothing."""
    banned = ("skip", "skipif", "xfail", "importorskip", "exit")
    for line, name in source.uses():
        parts = name.split(".")
        if parts[0] == "pytest" and parts[-1] in banned:
            yield f"{source.path}:{line}: {name}"


def asserts(source: Source) -> Iterator[str]:
    """Every test can fail: it asserts, expects an exception, or calls something of its file that does."""
    functions = [node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    asserting = {node.name for node in functions if _asserts(node)}
    grew = True
    while grew:
        more = {node.name for node in functions if _names(node) & asserting}
        grew = not more <= asserting
        asserting |= more
    for node in functions:
        if node.name.startswith("test_") and node.name not in asserting:
            yield f"{source.path}:{node.lineno}: {node.name} asserts nothing"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant) and node.test.value:
            yield f"{source.path}:{node.lineno}: an assertion that cannot fail"


def _names(node: ast.AST) -> set[str]:
    """Every name and attribute that is mentioned below a node."""
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return names | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


def _asserts(node: ast.AST) -> bool:
    words = ("assert", "check", "expect", "refuse")
    own = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""
    called = {
        one.func.id if isinstance(one.func, ast.Name) else one.func.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Name | ast.Attribute)
    } - {own}
    return any(isinstance(one, ast.Assert) for one in ast.walk(node)) or any(
        name in ("raises", "warns", "fail") or name.lstrip("_").startswith(words) for name in called
    )


# -- which rule holds where


@dataclass(frozen=True)
class Rule:
    """A rule, the files that it holds for, and a sample (path, text) that breaks it."""

    judge: Callable[[Source], Iterator[str]]
    where: str
    """A regular expression that the path matches from its beginning."""
    sample: tuple[str, str]

    def over(self, sources: list[Source]) -> list[str]:
        """Every place where one of these files breaks the rule."""
        return [place for one in sources if re.match(self.where, one.path) for place in self.judge(one)]


_CODE = r"src/.*\.py$"
_OURS = r"(src|examples|benchmarks)/.*\.py$"
_PYTHON = r".*\.py$"
_TESTS = r"tests/.*test_\w+\.py$"
_SLASH = "/"

RULES = {
    "private torch": Rule(
        private_torch, _OURS, ("src/fourfold/a.py", "from torch.nn import functional as F\nF._x()\n")
    ),
    "communication": Rule(
        communication, _CODE, ("src/fourfold/a.py", "import torch.distributed as dist\ndist.all_reduce(1)\n")
    ),
    "plain models": Rule(
        plain_models, r"src/fourfold/models/.*\.py$", ("src/fourfold/models/a.py", "import fourfold.wire\n")
    ),
    "file size": Rule(file_size, _CODE, ("src/fourfold/a.py", "x = 1\n" * 501)),
    "function size": Rule(function_size, _CODE, ("src/fourfold/a.py", "def f():\n" + "    x = 1\n" * 60)),
    "one noun": Rule(one_noun, _PYTHON, ("tests/wire/helpers.py", "")),
    "machine paths": Rule(machine_paths, r".*", ("docs/a.md", f"see {_SLASH}root{_SLASH}x\n")),
    "finished": Rule(finished, r"(src|tests|examples|benchmarks)/(?!house/).*\.py$", ("src/a.py", "# TODO\n")),
    "runs": Rule(runs, _PYTHON, ("tests/a/test_a.py", "import pytest\n\n@pytest.mark.skip\ndef test_a(): ...\n")),
    "asserts": Rule(asserts, _TESTS, ("tests/a/test_a.py", "def test_a():\n    print(1)\n")),
}
