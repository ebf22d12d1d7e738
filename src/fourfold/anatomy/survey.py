"""What a plain model is, found by one forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.anatomy.blocks import Call, Calls, blocks
from fourfold.anatomy.rehearsal import Rehearsal
from fourfold.anatomy.roles import BATCH_NORMS, BatchNorm, Beside, Dropout, Linear, Norm, Raw, Shared, Whole
from fourfold.anatomy.rows import Forward, find, rows_of, with_telling_rows
from fourfold.anatomy.ties import own_names, ties
from fourfold.anatomy.transcript import Transcript
from fourfold.anatomy.twin import Twin, twin, twins
from fourfold.anatomy.watch import RandomCall, Watch
from fourfold.anatomy.wholes import find as find_roles
from fourfold.randomness import Layout, RandomnessError
from fourfold.torch_private import dispatch_mode, leaves, storage_key


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
        read_outside: parameters of a block that something read while that block's forward was not running: another
            block, the loss (a penalty), a hook.
        linears: weight → role, axes, layout, the module that runs it, units and parts.
        embeddings: table → axis of its columns.
        norms: module path of a norm → axis of the features that it normalises, and whether it does so across it.
        raw: parameter that joins activations elementwise → axis of these, and whether it is split like them.
        whole: path of a module that must run on whole features → axes over which its input lies and its output is
            cut. What is inside one is in none of the others.
        shared: weight of a reducing linear, or "PATH:PLACE" of an output of a module that runs whole → the features of
            it whose gradient is partial over an axis, since split features use them.
        beside: "MODULE:NAME" of a buffer that a module reads, or of the place of a tensor that it is given → the dim of
            it that runs over split features, and is dealt like them.
        outputs: axis of the features of each floating tensor that the model returned, in order of leaves.
        exits: path of a module that the loss calls itself → the same of what it returned last.
        siblings: groups of linear weights that read the very same tensor.
        dropouts: every dropout in order of execution.
        batch_norms: every call of `F.batch_norm` that takes statistics of the batch, in order of execution.
        layouts: site of a dropout → how the rows lie in its tensor, where they are not whole and in dim 0.
        random_calls: what draws from torch's own generators in training.
        unknown_rows: dropouts whose rows cannot be told, with the reason, one line each.
        repeated: modules that drop out, or take statistics of the batch, inside a `torch.utils.checkpoint` of the
            model's own, which backward runs again without us.
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
    read_outside: tuple[str, ...]
    linears: dict[str, Linear]
    embeddings: dict[str, str]
    norms: dict[str, Norm]
    raw: dict[str, Raw]
    siblings: tuple[tuple[str, ...], ...]
    dropouts: tuple[Dropout, ...]
    problems: tuple[str, ...]
    traced: str
    failures: tuple[str, ...] = field(default=(), compare=False)
    batch_norms: tuple[BatchNorm, ...] = ()
    layouts: dict[str, Layout] = field(default_factory=dict)
    random_calls: tuple[RandomCall, ...] = ()
    unknown_rows: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    whole: dict[str, Whole] = field(default_factory=dict)
    outputs: tuple[str | None, ...] = ()
    exits: dict[str, tuple[str | None, ...]] = field(default_factory=dict)
    shared: dict[str, Shared] = field(default_factory=dict)
    beside: dict[str, Beside] = field(default_factory=dict)

    @property
    def inexact(self) -> tuple[str, ...]:
        """What no plan makes equal to one process, one line each: random numbers that have no logical place."""
        drawn = (
            f"{module or 'the model'} calls {function}, which draws from torch's own generator: other plans draw other "
            "numbers, and a resumed run does not repeat them"
            for module, function in self.random_calls
        )
        parts = (f"{line}; every part of a batch draws its own mask" for line in self.unknown_rows)
        return (*drawn, *parts)


Loss = Callable[[nn.Module, Any], Any]


def survey(model: nn.Module, loss: Loss, batch: Mapping[str, Tensor], whole: Sequence[str] = ()) -> Anatomy:
    """Run `loss(model, batch)` once on a twin of the model in training mode, cheaply if its code allows it.

    If it has dropouts, it may run once more with other rows, to see where rows lie in the tensors dropped from.

    Args:
        whole: modules that are to run whole, whatever could be split in them: paths, in which `*` stands for anything.

    Raises:
        AnatomyError: the forward runs neither on meta nor on fake nor on real tensors.
        RandomnessError: a dropout that no stream can stand for.
    """
    failures: list[str] = []
    last, cause = "", None
    for attempt in twins(model, _enough_rows(model, batch), _real):
        try:
            return _run_as_needed(attempt, loss, tuple(failures), tuple(whole))
        except RandomnessError:  # a dropout that cannot follow the rows: no other tensors would change that
            raise
        except Exception as error:  # any operator may refuse meta or fake tensors, each in its own way
            reason = (str(error).strip() or "no message").splitlines()[0]
            last = f"{type(error).__name__}: {reason}"
            failures.append(f"{attempt.kind}: {last}")
            cause = error
    raise AnatomyError(
        f"{type(model).__name__} does not run on its own batch, before any plan: {last}; call the loss on the plain "
        "model and a batch to see where"
    ) from cause


class _Reads(dispatch_mode()):
    """Notes when each parameter is read, itself or by a view, below autograd and custom functions.

    Attributes:
        times: parameter → the clock of calls at its reads, by first use.
    """

    def __init__(self, model: nn.Module, calls: Calls) -> None:
        super().__init__()
        self.calls = calls
        self.times: dict[str, set[int]] = {}
        self._names: dict[int, list[str]] = {}
        parameters = dict(model.named_parameters())
        for name in own_names(model).values():
            self._names.setdefault(storage_key(parameters[name]), []).append(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for value in leaves((args, kwargs)):
            # Tensors of other layouts (sparse) have no storage, and no view of a parameter is one of them.
            if isinstance(value, Tensor) and value.layout == torch.strided:
                for name in self._names.get(storage_key(value), ()):
                    self.times.setdefault(name, set()).add(self.calls.clock)
        return func(*args, **(kwargs or {}))


def _run_as_needed(attempt: Twin, loss: Loss, failures: tuple[str, ...], whole: tuple[str, ...]) -> Anatomy:
    """With a graph, which without values costs nothing; with values only if something asks for gradients."""
    # Only with gradients do most models checkpoint themselves, and is it known where a batch norm's backward takes
    # statistics.
    grad = attempt.kind != "real" or _has_batch_norm(attempt.model) or _checkpoints(attempt.model)
    attempt = with_telling_rows(attempt)
    try:
        return _run(attempt, loss, failures, whole, grad=grad)
    except RuntimeError as error:
        if grad or not ("grad" in str(error) and "require" in str(error)):
            raise
        return _run(attempt, loss, failures, whole, grad=True)


def _run(attempt: Twin, loss: Loss, failures: tuple[str, ...], whole: tuple[str, ...], *, grad: bool) -> Anatomy:
    model, calls = attempt.model, Calls()
    reads = _Reads(model, calls)
    rehearsal = Rehearsal(calls)
    transcript = Transcript(model, rehearsal)
    watch = Watch(rehearsal)
    for module in model.modules():
        if type(module).forward is nn.SyncBatchNorm.forward:  # it would ask for a GPU, and for other ranks
            module.forward = partial(nn.BatchNorm2d.forward, module)  # type: ignore[arg-type]
    modes = (
        attempt.mode,
        calls.watching(model),
        transcript.watching(model),
        reads,
        watch,
        rehearsal,
        transcript,
    )
    with torch.set_grad_enabled(grad), ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        loss(model, attempt.batch)
    found = blocks(model, calls.done)
    before, after = _around(reads.times, found)
    paths = tuple(call.path for call in found)
    forward = Forward.of(rows_of(attempt.batch), rehearsal, paths)
    roles = find_roles(model, transcript, paths, whole)
    named = zip(roles.dropouts, forward.sites, strict=True)
    rows = find(attempt, loss, forward, paths, grad=grad)
    return Anatomy(
        blocks=paths,
        before=before,
        after=after,
        ties=ties(model),
        order=tuple(reads.times),
        unused=tuple(name for name in own_names(model).values() if name not in reads.times),
        read_outside=_outside(reads.times, found),
        linears=roles.linears,
        embeddings=roles.embeddings,
        norms=roles.norms,
        raw=roles.raw,
        siblings=roles.siblings,
        dropouts=tuple(dropout._replace(site=site) for dropout, site in named),
        problems=tuple(dict.fromkeys(trouble.line for trouble in roles.troubles)),
        traced=attempt.kind,
        failures=failures,
        batch_norms=tuple(transcript.batch_norms),
        layouts=rows.layouts,
        random_calls=watch.random_calls,
        unknown_rows=rows.unknown,
        whole=roles.whole,
        outputs=roles.outputs,
        exits=roles.exits,
        shared=roles.shared,
        beside=roles.beside,
        repeated=tuple(sorted(rehearsal.repeated | {norm.module for norm in transcript.batch_norms if norm.repeated})),
    )


def _around(times: Mapping[str, set[int]], found: tuple[Call, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    outside = [name for name in times if _home(name, found) is None]
    end = found[-1].stop if found else 0
    before = tuple(name for name in outside if min(times[name]) < end)
    return before, tuple(name for name in outside if name not in set(before))


def _outside(times: Mapping[str, set[int]], found: tuple[Call, ...]) -> tuple[str, ...]:
    homes = {name: _home(name, found) for name in times}
    return tuple(
        name
        for name, home in homes.items()
        if home is not None and not all(home.start <= time < home.stop for time in times[name])
    )


def _home(name: str, found: tuple[Call, ...]) -> Call | None:
    """The call of the block that a parameter belongs to."""
    return next((call for call in found if name.startswith(f"{call.path}.")), None)


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, BATCH_NORMS) for module in model.modules())


def _checkpoints(model: nn.Module) -> bool:
    """A switch such as transformers' `gradient_checkpointing`, which without gradients does nothing, is on."""
    return any(
        value is True and "checkpointing" in name for module in model.modules() for name, value in vars(module).items()
    )


def _enough_rows(model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Batch norm refuses to take statistics of a single row."""
    if _has_batch_norm(model) and all(tensor.dim() and len(tensor) == 1 for tensor in batch.values()):
        return {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    return batch


def _real(model: nn.Module) -> nn.Module:
    return twin(model, lambda t: torch.zeros_like(t, device="cpu"), lambda t: torch.zeros_like(t, device="cpu"))
