"""The tree keeps the house rules, and each rule would notice if it did not."""

from __future__ import annotations

import re

import pytest

from house.rules import RULES, Source, asserts, communication, private_torch, tracked


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    return tracked()


@pytest.mark.parametrize("name", RULES)
def test_the_tree_keeps_the_rule(name: str, sources: list[Source]) -> None:
    broken = RULES[name].over(sources)
    assert not broken, f"{RULES[name].judge.__doc__}\n" + "\n".join(broken)


@pytest.mark.parametrize("name", RULES)
def test_the_rule_notices_what_breaks_it(name: str) -> None:
    assert RULES[name].over([Source(*RULES[name].sample)])


def test_tests_mirror_the_rooms(sources: list[Source]) -> None:
    rooms = {source.path.split("/")[2].removesuffix(".py") for source in sources if source.path.startswith("src/")}
    folders = {source.path.split("/")[1] for source in sources if re.match(r"tests/\w+/", source.path)}
    assert folders <= rooms | {"browser", "claims", "docs", "house", "traps"}


def test_the_rules_look_at_something(sources: list[Source]) -> None:
    paths = {source.path for source in sources}
    assert {"src/fourfold/plan/plan.py", "tests/house/rules.py", "README.md", "Makefile"} <= paths


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch._C\n",
        "import torch._dynamo\n",
        "from torch.distributed._composable import fsdp\n",
        "from torch.utils import _pytree as tree\n",
        "import torch as t\nt.autograd._x\n",
        "def f():\n    from torch._subclasses import FakeTensorMode\n",
    ],
)
def test_private_torch_in_every_disguise(text: str) -> None:
    assert list(private_torch(Source("src/fourfold/placement/a.py", text)))


@pytest.mark.parametrize("text", ["import torch\ntorch.__version__\n", "class A:\n    _x = 1\nA._x\n", "self._x = 1\n"])
def test_what_is_not_private_torch(text: str) -> None:
    assert not list(private_torch(Source("src/fourfold/placement/a.py", text)))


@pytest.mark.parametrize(
    ("path", "text", "allowed"),
    [
        ("src/fourfold/sync/a.py", "import torch\ntorch.distributed.all_reduce(x)\n", False),
        ("src/fourfold/sync/a.py", "from torch.distributed import all_reduce\n", False),
        ("src/fourfold/wire/a.py", "from torch.distributed import all_reduce\n", True),
        ("src/fourfold/training/launch.py", "from torch.distributed.elastic.agent.server import api\n", True),
        ("src/fourfold/training/launch/a.py", "from torch.distributed import all_reduce\n", False),
        ("src/fourfold/placement/a.py", "from torch.distributed.elastic.agent.server import api\n", False),
        ("src/fourfold/training/a.py", "import torch.distributed.checkpoint as dcp\ndcp.load(x)\n", True),
    ],
)
def test_who_may_communicate(path: str, text: str, allowed: bool) -> None:
    assert (not list(communication(Source(path, text)))) == allowed


@pytest.mark.parametrize(
    ("body", "fails"),
    [
        ("def test_a():\n    x = 1\n", True),
        ("def test_a():\n    assert True\n", True),
        ("def test_a():\n    assert x\n", False),
        ("def test_a():\n    with pytest.raises(ValueError):\n        f()\n", False),
        ("def test_a():\n    torch.testing.assert_close(a, b)\n", False),
        ("def body(w):\n    assert w\n\ndef test_a():\n    launch(3, body)\n", False),
        ("def inner(w):\n    assert w\n\ndef body(w):\n    inner(w)\n\ndef test_a():\n    launch(3, body)\n", False),
        ("def body(w):\n    w()\n\ndef test_a():\n    launch(3, body)\n", True),
    ],
)
def test_what_counts_as_an_assertion(body: str, fails: bool) -> None:
    assert bool(list(asserts(Source("tests/a/test_a.py", body)))) == fails
