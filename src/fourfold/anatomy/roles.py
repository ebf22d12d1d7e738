"""The role of every layer on a tensor grid, from one traced forward.

A tag says over which axis of the grid the features of an activation lie: "x", "y", or None (whole). Tags flow through
the operations: an embedding makes "x" (the residual stream lies over x), a linear flips x to y and y to x (a whole
input gives x), a norm and every elementwise operation keep. A "normal" linear contracts over x and puts its output
over y, a "transposed" one the other way round. Nothing here knows an architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold.anatomy.blocks import Calls
from fourfold.anatomy.rehearsal import Rehearsal
from fourfold.anatomy.ties import own_names
from fourfold.torch_private import inside_checkpoint, leaves

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Modules whose forward may take statistics over the rows of its batch (the lazy ones become one of these)."""

FLIP: dict[str | None, str] = {"x": "y", "y": "x", None: "x"}


class Linear(NamedTuple):
    """A weight that contracts features.

    Attributes:
        role: "normal" (x in, y out), "transposed" (y in, x out), or "entry" (whole in, x out: convolutions on images).
        contract: axis over which its input features lie, None if whole.
        output: axis over which its output features lie.
        layout: "out,in" (nn.Linear) or "in,out" (transformers' Conv1D).
        module: path of the module that ran it.
    """

    role: str
    contract: str | None
    output: str
    layout: str
    module: str


class Dropout(NamedTuple):
    """A dropout that ran: in which module, over which axis its features lie, on what ("attention" or "dropout")."""

    module: str
    axis: str | None
    kind: str


class BatchNorm(NamedTuple):
    """A call of `F.batch_norm` that takes statistics over the rows of its batch.

    Attributes:
        module: path of the module that calls it.
        channels: how many pairs of statistics it takes.
        learned: its input has a gradient, so that backward takes statistics too.
        repeated: it is inside a `torch.utils.checkpoint` of the model's own.
    """

    module: str
    channels: int
    learned: bool
    repeated: bool = False


@dataclass
class Roles:
    """What a trace found; all names are the parameters' own (the first of a tie).

    Attributes:
        linears: weight → its role.
        embeddings: table → axis of its columns.
        norms: module path of a norm → axis of the features that it normalises.
        raw: parameter that joins activations elementwise → axis of these (None: whole).
        siblings: groups of linear weights that read the very same tensor, in order of use.
        dropouts: in order of execution.
        batch_norms: in order of execution.
        problems: what cannot be split as found, one line each.
    """

    linears: dict[str, Linear] = field(default_factory=dict)
    embeddings: dict[str, str] = field(default_factory=dict)
    norms: dict[str, str | None] = field(default_factory=dict)
    raw: dict[str, str | None] = field(default_factory=dict)
    siblings: tuple[tuple[str, ...], ...] = ()
    dropouts: list[Dropout] = field(default_factory=list)
    batch_norms: list[BatchNorm] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Tracer(TorchFunctionMode):
    """Carries tags through one forward; `roles()` afterwards is what it found."""

    def __init__(self, model: nn.Module, calls: Calls, rehearsal: Rehearsal) -> None:
        """Nothing is found yet.

        Args:
            model: the one that will run.
            calls: of the same forward.
            rehearsal: entered around this mode, so that it gets the functions that dropouts are.
        """
        super().__init__()
        self.found = Roles()
        self.calls, self.rehearsal = calls, rehearsal
        self.names = own_names(model)
        self.norms = {path for path, module in model.named_modules() if _is_norm(module)}
        self.tags: dict[int, str | None] = {}
        self.kept: list[Tensor] = []  # an id is a tensor's only while it lives
        self.readers: dict[int, list[str]] = {}

    def roles(self) -> Roles:
        """The result, siblings included."""
        groups = (tuple(dict.fromkeys(names)) for names in self.readers.values())
        self.found.siblings = tuple(group for group in groups if len(group) > 1)
        return self.found

    def tag(self, value: Any) -> str | None:
        """The tag of a tensor."""
        return self.tags.get(id(value))

    def put(self, value: Any, tag: str | None) -> None:
        """Tag all tensors of a result; indices and masks carry none."""
        for tensor in leaves(value):
            if isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
                self.tags[id(tensor)] = tag
                self.kept.append(tensor)

    def name(self, value: Any) -> str | None:
        """The parameter's own name, if it is one or a view of one."""
        return self.names.get(id(value))

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        drawn = len(self.rehearsal.seen)
        result = func(*args, **kwargs)
        handler = _HANDLERS.get(func, _flow)
        handler(self, func, args, kwargs, result)
        for _ in self.rehearsal.seen[drawn:]:
            kind = "attention" if func in _ATTENTION else "dropout"
            operand = next(value for value in leaves((args, kwargs)) if isinstance(value, Tensor))
            self.found.dropouts.append(Dropout(self.calls.inside, self.tag(operand), kind))
        return result


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and any(True for _ in module.parameters(recurse=False))


def _argument(args: tuple, kwargs: dict, index: int, name: str) -> Any:
    return args[index] if len(args) > index else kwargs.get(name)


def _linear(tracer: Tracer, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
    if func is torch.addmm:
        x, weight = _argument(args, kwargs, 1, "mat1"), _argument(args, kwargs, 2, "mat2")
    else:
        x, weight = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight")
    name = tracer.name(weight)
    if name is None:
        return _flow(tracer, func, args, kwargs, result)
    contract = tracer.tag(x)
    output = FLIP[contract]
    role = {"x": "normal", "y": "transposed", None: "entry"}[contract]
    layout = "in,out" if func is torch.addmm else "out,in"
    linear = Linear(role, contract, output, layout, tracer.calls.inside)
    before = tracer.found.linears.setdefault(name, linear)
    if before.contract != contract:
        tracer.found.problems.append(
            f"{name}: contracted over {before.contract} by {before.module}, over {contract} by {linear.module}"
        )
    tracer.kept.append(x)
    tracer.readers.setdefault(id(x), []).append(name)
    tracer.put(result, output)


def _embedding(tracer: Tracer, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
    name = tracer.name(_argument(args, kwargs, 1, "weight"))
    if name is not None:
        tracer.found.embeddings[name] = "x"
    tracer.put(result, "x")


def _batch_norm(tracer: Tracer, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
    x = _argument(args, kwargs, 0, "input")
    # torch.batch_norm has the affine weights before the running statistics; both have the flag in the sixth place.
    if _argument(args, kwargs, 5, "training"):
        where, repeated = tracer.calls.inside, inside_checkpoint()
        tracer.found.batch_norms.append(BatchNorm(where, x.shape[1], x.requires_grad, repeated))
    _flow(tracer, func, args, kwargs, result)


def _reduce(tracer: Tracer, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
    """Across the features of dim −1: right on a whole tensor and inside heads (4 dims), a problem on a split one."""
    x = _argument(args, kwargs, 0, "input")
    where = tracer.calls.inside
    if tracer.tag(x) and x.dim() < 4:
        tracer.found.problems.append(f"{where}: {func.__name__} across features that are split over {tracer.tag(x)}")
    _flow(tracer, func, args, kwargs, result)


def _flow(tracer: Tracer, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
    """Anything else keeps the tag of its operands; a parameter among them is raw, or the weight of a norm."""
    operands = [value for value in leaves((args, kwargs)) if isinstance(value, Tensor)]
    tags = {tag for tag in (tracer.tag(value) for value in operands) if tag}
    where = tracer.calls.inside
    if len(tags) > 1:
        tracer.found.problems.append(
            f"{where}: {getattr(func, '__name__', func)} joins features over x with features over y"
        )
    tag = min(tags, default=None)
    parameters = [name for name in map(tracer.name, operands) if name is not None]
    if where in tracer.norms and tags:
        tracer.found.norms.setdefault(where, tag)
    elif tags:
        for name in parameters:
            if name not in tracer.found.linears and name not in tracer.found.embeddings:
                tracer.found.raw.setdefault(name, tag)
    if not tags and len(parameters) == 1 and isinstance(result, Tensor):
        tracer.names[id(result)] = parameters[0]  # an expanded or sliced parameter is still that parameter
        tracer.kept.append(result)
    else:
        tracer.put(result, tag)


_ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
"""Whose dropout is that of the attention's weights."""

_HANDLERS: dict[Any, Callable[..., None]] = {
    F.linear: _linear,
    torch.addmm: _linear,
    torch.conv1d: _linear,
    torch.conv2d: _linear,
    torch.conv3d: _linear,
    F.embedding: _embedding,
    F.batch_norm: _batch_norm,
    torch.batch_norm: _batch_norm,
    F.softmax: _reduce,
    torch.softmax: _reduce,
    Tensor.softmax: _reduce,
    torch.topk: _reduce,
    Tensor.topk: _reduce,
}
