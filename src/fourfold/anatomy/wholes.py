"""Which modules must run on whole features: found by trying, the cheapest first.

Where a reading finds that something cannot be split (a router's softmax over experts, a table tied to a layer that
lies the other way round), a module around it, or one that made what it reads, may run whole: its features are gathered,
it is computed by every rank alike, and its output is cut again, or not. Every choice is a reading of the same
transcript. What is alike in all blocks is treated alike.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from heapq import heapify, heappop, heappush
from itertools import count, product
from typing import NamedTuple

from torch import nn

from fourfold.anatomy import contractions, reductions, views
from fourfold.anatomy.joins import flow
from fourfold.anatomy.reading import Reading, Subject
from fourfold.anatomy.roles import BATCH_NORMS, Roles, Trouble
from fourfold.anatomy.ties import own_names
from fourfold.anatomy.transcript import Transcript

HANDLERS = {"": flow, **views.HANDLERS, **reductions.HANDLERS, **contractions.HANDLERS}
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""A grid splits them. Their output may stay whole; to cut it again, something larger is taken if it helps."""

TRIES = 200
"""Readings after which the best so far is good enough."""

Choice = tuple[tuple[str, str | None], ...]


class _Read(NamedTuple):
    roles: Roles
    feeds: Mapping[str, set[str]]


def find(model: nn.Module, transcript: Transcript, blocks: tuple[str, ...], asked: Sequence[str] = ()) -> Roles:
    """The roles of a model's layers; `troubles` holds what no module that runs whole would prevent.

    Args:
        asked: modules that run whole in any case: paths, in which `*` stands for anything.
    """
    search = _Search(model, transcript, blocks, asked)
    found: list[Roles] = []
    for patient, bare in product((False, True), repeat=2):
        found.append(search.best(bare=bare, patient=patient))
        if not found[-1].troubles:
            return found[-1]
    return min(found, key=lambda roles: len(roles.troubles))


class _Search:
    def __init__(self, model: nn.Module, transcript: Transcript, blocks: tuple[str, ...], asked: Sequence[str]) -> None:
        self.modules = dict(model.named_modules())
        norms = {path for path, module in self.modules.items() if _is_norm(module)}
        names = own_names(model)
        sizes = {names[id(weight)]: tuple(weight.shape) for weight in model.parameters()}
        self.subject = Subject(transcript, norms, blocks, sizes)
        self.patterns: dict[str, list[str]] = {}
        for path in self.modules:
            self.patterns.setdefault(self._alike(path), []).append(path)
        matching = (path for path in self.modules if any(fnmatchcase(path, one) for one in asked))
        self.asked = list(dict.fromkeys(self._alike(path) for path in matching if self._may_be_whole(path)))
        self.costs = {
            path: 1 + sum(weight.numel() for weight in module.parameters()) for path, module in self.modules.items()
        }

    def best(self, *, bare: bool, patient: bool) -> Roles:
        """Uniform-cost search; the cost of a choice is the number of weights that every rank then holds.

        Args:
            bare: layers may be cut again behind, and tables of biases run whole.
            patient: where a module helps, try also what follows from its output lying otherwise. It takes longer.
        """
        order, tries = count(), 0
        waiting: list[tuple[int, int, Choice, str, str, Counter[str]]] = []
        for outputs in product((None, "x", "y"), repeat=len(self.asked)):
            choice = tuple(sorted(zip(self.asked, outputs, strict=True), key=str))
            waiting.append((0, next(order), choice, "", "", Counter()))
        best: tuple[int, int, Roles] | None = None
        seen: set[Choice] = set()
        while waiting and tries < TRIES:
            cost, _, choice, new, against, before = heappop(waiting)
            if choice in seen:
                continue
            seen.add(choice)
            tries += 1
            read = self._read(choice)
            troubles = read.roles.troubles
            if best is None or (len(troubles), cost) < best[:2]:
                best = (len(troubles), cost, read.roles)
            if not troubles:
                break
            kinds = Counter(map(_kind, troubles))
            if kinds[against] >= before[against] > 0:
                continue  # the choice did not help
            # It helped and did no harm: what is left has nothing to do with it, but for the same module cut otherwise.
            if kinds.keys() < before.keys():
                waiting = [one for one in waiting if patient and new in dict(one[2])]
                heapify(waiting)
            taken = {pattern for pattern, _ in choice}
            for pattern, output in self._candidates(troubles[0], read, bare):
                if pattern not in taken:
                    more = tuple(sorted((*choice, (pattern, output)), key=str))
                    price = cost + self.costs[self.patterns[pattern][0]]
                    heappush(waiting, (price, next(order), more, pattern, _kind(troubles[0]), kinds))
        assert best is not None
        return best[2]

    def _alike(self, path: str) -> str:
        """The same for modules of one class in all blocks, and in all experts."""
        return f"{alike(path)}:{type(self.modules[path]).__qualname__}"

    def _read(self, choice: Choice) -> _Read:
        whole = {path: output for pattern, output in choice for path in self.patterns[pattern]}
        reading = Reading(self.subject, whole, HANDLERS)
        return _Read(reading.run(), reading.feeds)

    def _candidates(self, trouble: Trouble, read: _Read, bare: bool) -> Iterator[tuple[str, str | None]]:
        paths = {path for path in self._involved(trouble, read) if self._may_be_whole(path)}
        for pattern in dict.fromkeys(self._alike(path) for path in sorted(paths)):
            for output in _outputs(self.modules[self.patterns[pattern][0]], bare):
                yield pattern, output

    def _involved(self, trouble: Trouble, read: _Read) -> Iterator[str]:
        """The module of the trouble, those that made what it reads, and all around them."""
        weights, waiting = set(trouble.suspects), list(trouble.suspects)
        while waiting:
            more = read.feeds.get(waiting.pop(), set()) - weights
            weights |= more
            waiting.extend(more)
        starts = {trouble.where}
        for weight in weights:
            linear = read.roles.linears.get(weight)
            path, _, place = weight.partition(":")  # an output of a module that runs whole already
            starts.add(linear.module if linear else path if place else weight.rpartition(".")[0])
        for start in starts:
            parts = start.split(".")
            yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))

    def _may_be_whole(self, path: str) -> bool:
        if not path or path not in self.modules or path in self.subject.norms:
            return False
        if isinstance(self.modules[path], (nn.ModuleList, nn.ModuleDict)):
            return False
        return not any(block == path or block.startswith(f"{path}.") for block in self.subject.blocks)


def _outputs(module: nn.Module, bare: bool) -> tuple[str | None, ...]:
    """How the output of a module that runs whole may lie. A table of words is never whole, one of biases may be."""
    if isinstance(module, nn.Embedding):
        return ("y",) if bare else ()
    return (None,) if isinstance(module, LAYERS) and not bare else (None, "x", "y")


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, BATCH_NORMS) or any(True for _ in module.children()):
        return False
    return "norm" in type(module).__name__.lower()


def alike(path: str) -> str:
    """The same for all blocks, and for all experts."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def _kind(trouble: Trouble) -> str:
    """What is wrong, whichever block and axis it is in."""
    return re.sub(r"\b(x|y|None)\b", "?", alike(trouble.where) + trouble.line.partition(":")[2])
