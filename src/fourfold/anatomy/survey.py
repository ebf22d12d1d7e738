"""What a plain model is, found by one forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.anatomy.blocks import Call, Calls, blocks
from fourfold.anatomy.roles import Dropout, Linear, Tracer
from fourfold.anatomy.ties import own_names, ties
from fourfold.anatomy.twin import Twin, twin, twins
from fourfold.torch_private import dispatch_mode, leaves


class AnatomyError(ValueError):
    """A model that cannot be surveyed; the message holds the failure of each attempt."""


@dataclass(frozen=True)
class Anatomy:
    """What a plain model is. A tied parameter goes by its first name everywhere but in `ties`.

    Attributes:
        blocks: module paths of the repeated blocks, in execution order; () if it has none.
        before: parameters of no block, first used before the last block ends, by first use.
        after: parameters of no block, first used after the last block, by first use; all, if there are no blocks.
        ties: groups of names of one parameter.
        order: every parameter that the forward read, by first use.
        unused: parameters that the forward never read.
        linears: weight → role, axes, layout and the module that runs it.
        embeddings: table → axis of its columns.
        norms: module path of a norm → axis of the features that it normalises.
        raw: parameter that joins activations elementwise → axis of these.
        siblings: groups of linear weights that read the very same tensor.
        dropouts: every dropout in order of execution.
        problems: what a tensor grid cannot split as it stands, one line each.
        traced: how the forward ran: "meta", "fake" (fake CPU tensors) or "real" (truly, on CPU).
        failures: why the cheaper ways did not run, one line each.
    """

    blocks: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    ties: tuple[tuple[str, ...], ...]
    order: tuple[str, ...]
    unused: tuple[str, ...]
    linears: dict[str, Linear]
    embeddings: dict[str, str]
    norms: dict[str, str | None]
    raw: dict[str, str | None]
    siblings: tuple[tuple[str, ...], ...]
    dropouts: tuple[Dropout, ...]
    problems: tuple[str, ...]
    traced: str
    failures: tuple[str, ...] = field(default=(), compare=False)


Loss = Callable[[nn.Module, Any], Any]


def survey(model: nn.Module, loss: Loss, batch: Mapping[str, Tensor]) -> Anatomy:
    """Run `loss(model, batch)` once on a twin of the model in training mode, cheaply if its code allows it.

    Raises:
        AnatomyError: the forward runs neither on meta nor on fake nor on real tensors.
    """
    failures: list[str] = []
    last: Exception | None = None
    for attempt in twins(model, batch, _real):
        try:
            return _run(attempt, loss, tuple(failures))
        except Exception as error:  # any operator may refuse meta or fake tensors, each in its own way
            reason = (str(error).strip() or "no message").splitlines()[0]
            failures.append(f"{attempt.kind}: {type(error).__name__}: {reason}")
            last = error
    raise AnatomyError(f"{type(model).__name__}: its forward runs in no way; " + "; ".join(failures)) from last


class _Reads(dispatch_mode()):
    """Notes when each parameter is first read, below autograd and custom functions."""

    def __init__(self, names: dict[int, str], calls: Calls) -> None:
        super().__init__()
        self.names, self.calls = names, calls
        self.first: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for value in leaves((args, kwargs)):
            if isinstance(value, Tensor) and id(value) in self.names:
                self.first.setdefault(self.names[id(value)], self.calls.clock)
        return func(*args, **(kwargs or {}))


def _run(attempt: Twin, loss: Loss, failures: tuple[str, ...]) -> Anatomy:
    model, calls = attempt.model, Calls()
    names = own_names(model)
    reads = _Reads(names, calls)
    tracer = Tracer(model, calls)
    with torch.no_grad(), attempt.mode, calls.watching(model), reads, tracer:
        loss(model, attempt.batch)
    roles = tracer.roles()
    found = blocks(model, calls.done)
    before, after = _around(reads.first, found)
    return Anatomy(
        blocks=tuple(call.path for call in found),
        before=before,
        after=after,
        ties=ties(model),
        order=tuple(reads.first),
        unused=tuple(name for name in names.values() if name not in reads.first),
        linears=roles.linears,
        embeddings=roles.embeddings,
        norms=roles.norms,
        raw=roles.raw,
        siblings=roles.siblings,
        dropouts=tuple(roles.dropouts),
        problems=tuple(dict.fromkeys(roles.problems)),
        traced=attempt.kind,
        failures=failures,
    )


def _around(first: dict[str, int], found: tuple[Call, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    outside = [name for name in first if not any(name.startswith(f"{call.path}.") for call in found)]
    end = found[-1].stop if found else 0
    before = tuple(name for name in outside if first[name] < end)
    return before, tuple(name for name in outside if name not in set(before))


def _real(model: nn.Module) -> nn.Module:
    return twin(model, lambda t: torch.zeros_like(t, device="cpu"), lambda t: torch.zeros_like(t, device="cpu"))
