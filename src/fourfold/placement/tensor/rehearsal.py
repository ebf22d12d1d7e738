"""A dry run of the split model beside the whole one: every shape must be the whole's, but for what is cut.

A count of heads that a module keeps to itself can fold heads into time and still run (`view(batch, -1, heads, width)`).
So every function that the model calls is compared (`comparison.py`), not the modules' outputs alone, and tried on
numbers where shapes do not tell (`probe.py`). Tensors have no values (or none that matter), and the mesh is dry:
nothing is allocated, nothing sent, and the bytes that would be sent are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold import torch_private
from fourfold.anatomy import Anatomy
from fourfold.anatomy.blocks import Calls
from fourfold.anatomy.rehearsal import Rehearsal, sites
from fourfold.anatomy.stock import OneSequenceARow
from fourfold.anatomy.twin import twin
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.executor import Executor
from fourfold.placement.tensor.probe import Call
from fourfold.torch_private import leaves

Shape = tuple[int, ...]
Loss = Callable[[nn.Module, Any], Any]


ARRANGING = frozenset(
    "__getitem__ contiguous expand expand_as flatten permute repeat repeat_interleave reshape select squeeze transpose "
    "unflatten unsqueeze view view_as".split()
)
"""What code may leave out where there is nothing to arrange: a single key-value head need not be repeated."""


class Made(NamedTuple):
    """What one call of a torch function gave: in which module, which function, shapes of the results."""

    module: str
    function: str
    shapes: tuple[Shape, ...]
    call: Call

    @property
    def computes(self) -> bool:
        """It does more than to arrange entries, or to say something of a tensor."""
        return self.function not in ARRANGING and (bool(self.shapes) or self.function == "__setitem__")


@dataclass
class Run:
    """What one forward came to.

    Attributes:
        made: every function that the model's code calls outside of the modules that executors take over.
        inside: those called inside of them, by name, in order, by module.
        times: module → how often it was called.
        draws: dropout site → shape of what is dropped from.
        outputs: shapes of the floating tensors that the model returned.
        returned: module that the loss called itself, and shapes of the floating tensors that it gave to the loss.
        given, gave: shapes of the floating tensors that modules that run whole are given, and give, by path.
        running: the function that runs, and in which module; where the run was when it ended.
        error: what ended it before its end; it is then as far as it came.
    """

    made: list[Made] = field(default_factory=list)
    inside: dict[str, list[str]] = field(default_factory=dict)
    times: Counter[str] = field(default_factory=Counter)
    draws: dict[str, Shape] = field(default_factory=dict)
    outputs: list[Shape] = field(default_factory=list)
    returned: list[tuple[str, list[Shape]]] = field(default_factory=list)
    given: dict[str, list[Shape]] = field(default_factory=dict)
    gave: dict[str, list[Shape]] = field(default_factory=dict)
    running: str = ""
    error: Exception | None = None


class _Executors:
    """Whether code of an executor runs just now, and not the model's own. The model is a twin that is run once."""

    def __init__(self, model: nn.Module) -> None:
        self.running = False
        for module in model.modules():
            executor = getattr(module.forward, "__self__", None)
            while isinstance(executor, Executor):
                beneath = executor.inner
                executor.on_blocks = self._while(True, executor.on_blocks)  # pyright: ignore[reportAttributeAccessIssue]
                executor.inner = self._while(False, beneath)
                executor = getattr(beneath, "__self__", None)

    def _while(self, running: bool, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            before, self.running = self.running, running
            try:
                return function(*args, **kwargs)
            finally:
                self.running = before

        return called


class _Shapes(TorchFunctionMode):
    def __init__(self, calls: Calls, opaque: frozenset[str], run: Run, executors: _Executors) -> None:
        super().__init__()
        self.calls, self.opaque, self.run, self.executors = calls, opaque, run, executors
        self._within: dict[str, str | None] = {}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        inside, name = self.calls.inside, getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__") or not self.calls.running:
            return func(*args, **(kwargs or {}))
        self.run.running = f"{inside or 'the model'}: {name}"
        opaque = self._opaque(inside)
        noted = opaque is None and not self.executors.running
        call = Call.of(func, args, kwargs or {}) if noted else None  # before it: some change their arguments' shapes
        result = func(*args, **(kwargs or {}))
        self.run.running = ""
        if opaque is not None:
            self.run.inside.setdefault(opaque, []).append(name)
        elif call is not None and any(isinstance(value, Tensor) for value in leaves((args, result))):
            shapes = tuple(tuple(value.shape) for value in leaves(result) if isinstance(value, Tensor))
            self.run.made.append(Made(inside, name, shapes, call))
        return result

    def _opaque(self, inside: str) -> str | None:
        """The opaque module that a module is, or is in."""
        if inside not in self._within:
            parts = inside.split(".")
            around = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
            self._within[inside] = next((path for path in around if path in self.opaque), None)
        return self._within[inside]


def run(
    model: nn.Module,
    loss: Loss,
    batch: Mapping[str, Tensor],
    anatomy: Anatomy,
    opaque: frozenset[str],
    beside: Callable[[Calls], AbstractContextManager[Any]] = nullcontext,
) -> Run:
    """One forward of a twin.

    Args:
        opaque: modules outside of which shapes are noted.
        beside: a mode of the caller's, which may ask what is being called.
    """
    found, calls = Run(), Calls()
    rehearsal = Rehearsal(calls)

    def note(module: nn.Module, args: Any, result: Any) -> None:
        found.outputs = _floating(result)

    def give_back(path: str, module: nn.Module, args: Any, result: Any) -> None:
        if not calls.running:
            found.returned.append((path, _floating(result)))

    def give(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        found.given[path] = _floating((args, kwargs))

    def get(path: str, module: nn.Module, args: Any, result: Any) -> None:
        found.gave[path] = _floating(result)

    with ExitStack() as stack:
        stack.callback(model.register_forward_hook(note).remove)
        for path in anatomy.whole:
            module = model.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(partial(give, path), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(partial(get, path)).remove)
        for path in anatomy.exits:
            stack.callback(model.get_submodule(path).register_forward_hook(partial(give_back, path)).remove)
        for mode in (calls.watching(model), beside(calls), _Shapes(calls, opaque, found, _Executors(model)), rehearsal):
            stack.enter_context(mode)
        try:
            loss(model, dict(batch))
        except Exception as error:  # operators refuse shapes in many ways; what it means is said when runs are compared
            found.error = error
    found.times = Counter(call.path for call in calls.done)
    found.draws = {site: tuple(seen.shape) for site, seen in sites(rehearsal.seen, calls.done, anatomy.blocks).items()}
    return found


def _floating(value: Any) -> list[Shape]:
    return [tuple(leaf.shape) for leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@dataclass(frozen=True)
class Stage:
    """Where a model is rehearsed: on the kind of tensors that its survey ran on.

    Attributes:
        model: the plain one.
        loss: calls it.
        batch: an example.
        kind: "meta", "fake" or "real" (zeros).
        dtype: of floating weights.
    """

    model: nn.Module
    loss: Loss
    batch: Mapping[str, Tensor]
    kind: str
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_fakes", torch_private.fake_mode() if self.kind == "fake" else None)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The modes that the rehearsal runs in."""
        fakes = self._fakes or nullcontext()  # type: ignore[attr-defined]
        with ExitStack() as stack:
            for mode in (OneSequenceARow(), _OnMeta()) if self.kind == "meta" else (fakes,):
                stack.enter_context(mode)
            yield

    @classmethod
    def of(cls, model: nn.Module, loss: Loss, batch: Mapping[str, Tensor], kind: str, dtype: torch.dtype) -> Stage:
        """With a twin of the model on meta, so that the model itself may change."""

        def on_meta(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device="meta")

        return cls(twin(model, on_meta, on_meta), loss, batch, kind, dtype)

    def twin(self, shapes: Mapping[str, Shape]) -> nn.Module:
        """A twin of the model; weights have the shapes given, or their own."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}

        def weight(tensor: Tensor) -> Tensor:
            wide = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
            return self._empty(shapes.get(names[id(tensor)], tuple(tensor.shape)), wide)

        return twin(self.model, weight, self.same).train(self.model.training)

    def inputs(self) -> dict[str, Tensor]:
        """The batch on these tensors."""
        return {name: self.same(tensor) for name, tensor in self.batch.items()}

    def same(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape; with its values where there are values."""
        if self.kind == "real" and not tensor.is_meta:
            return tensor.detach().clone()
        return self._empty(tuple(tensor.shape), tensor.dtype)

    def _empty(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        if self.kind == "real":
            return torch.zeros(shape, dtype=dtype)
        meta = torch.empty(shape, dtype=dtype, device="meta")
        fakes = self._fakes  # type: ignore[attr-defined]
        return meta if fakes is None else torch_private.fake_cpu(fakes, meta)


def refuse_draws(anatomy: Anatomy) -> None:
    """Copies of an activation must stay equal, and torch's generators of two ranks are not.

    Raises:
        PlacementError: names the first module and function that draw from them.
    """
    for module, function in anatomy.random_calls:
        raise PlacementError(
            f"{module or 'the model'}: {function} draws from torch's own generator, where ranks of x and y must all "
            "draw the same: use dropout (torch.nn.Dropout, torch.nn.functional.dropout), which fourfold draws alike "
            "everywhere, switch it off, or leave out plan.placement.tensor"
        )


class _OnMeta(TorchFunctionMode):
    """What code makes on the default device joins what is on meta: forward, a lookup takes both, but not backward."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given: tuple[tuple, dict[str, Any]] = args, kwargs or {}
        tensors = [leaf for leaf in leaves(given) if isinstance(leaf, Tensor) and leaf.dim()]
        if len({tensor.is_meta for tensor in tensors}) > 1:
            given = torch_private.map_leaves(_to_meta, given)
        return func(*given[0], **given[1])


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and value.dim() else value
