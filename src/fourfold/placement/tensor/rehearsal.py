"""A dry run of the split model beside the whole one: every shape must be the whole's, but for what is cut.

A count of heads that a module keeps to itself can fold heads into time and still run (`view(batch, -1, heads, width)`).
So every function that the model calls is compared, not the modules' outputs alone, and tried on numbers where shapes do
not tell (`probe.py`). Tensors have no values (or none that matter), and the mesh is dry: nothing is allocated, nothing
sent, and the bytes that would be sent are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fourfold import randomness, torch_private
from fourfold.anatomy import Anatomy
from fourfold.anatomy.blocks import Calls
from fourfold.anatomy.rehearsal import Rehearsal, sites
from fourfold.anatomy.twin import twin
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.dealing import Dealing
from fourfold.placement.tensor.executor import Executor
from fourfold.placement.tensor.probe import Call, agrees, suspicious
from fourfold.torch_private import leaves

Shape = tuple[int, ...]
Loss = Callable[[nn.Module, Any], Any]


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

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        inside, name = self.calls.inside, getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__") or not self.calls.running:
            return func(*args, **(kwargs or {}))
        self.run.running = f"{inside or 'the model'}: {name}"
        call = Call.of(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        self.run.running = ""
        opaque = next((path for path in self.opaque if inside == path or inside.startswith(f"{path}.")), None)
        if opaque is not None:
            self.run.inside.setdefault(opaque, []).append(name)
        elif not self.executors.running and any(isinstance(value, Tensor) for value in leaves((args, result))):
            shapes = tuple(tuple(value.shape) for value in leaves(result) if isinstance(value, Tensor))
            self.run.made.append(Made(inside, name, shapes, call))
        return result


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

    def entered(self) -> Any:
        """The mode that the rehearsal runs in."""
        if self.kind == "meta":
            return _OnMeta()
        return self._fakes or nullcontext()  # type: ignore[attr-defined]

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


def compare(
    whole: Run, local: Run, dealing: Dealing, coordinates: Mapping[str, int], gathered: Collection[str]
) -> None:
    """Every shape of the split run is that of the whole run, but where a dim is one that is cut; and so are values.

    Args:
        whole, local: the runs.
        dealing: what is cut, and how.
        coordinates: of this rank.
        gathered: paths of the modules whose input features are gathered before they run whole.

    Raises:
        PlacementError: names the module, the function and the two shapes.
    """
    if isinstance(local.error, PlacementError):
        raise local.error
    _compare_gathered(whole, local, gathered)
    _compare_returned(whole, local)
    ways = dealing.ways(coordinates)
    tried: set[str] = set()
    if local.error is None:
        _compare_calls(whole, local)
    for one, other in _matched(whole, local):
        if not _fits(one.shapes, other.shapes, ways):
            raise PlacementError(
                f"{_named(one)} gives {_text(one.shapes)} in the whole model, and {_text(other.shapes)} "
                "on a part of its heads or features: other dims differ than those that are cut. Does it count heads by "
                f"an attribute or a config that placement does not know? {_REMEDY}"
            )
        if suspicious(one.function, one.call, other.call):
            signature = repr((one.function, one.call.args, one.call.kwargs, other.call.args, other.call.kwargs))
            if signature not in tried and not agrees(one.call, other.call, ways):
                raise PlacementError(
                    f"{_named(one)} does not make of a part of the heads or features what it makes of all of them: it "
                    "moves or mixes them, or takes their number or their places from the shape of a tensor. Let a "
                    f"module of its own do it, which can run whole, or write it for every feature by itself; {_REMEDY}"
                )
            tried.add(signature)
    if local.error is not None:
        reason = (str(local.error).strip() or type(local.error).__name__).splitlines()[0]
        raise PlacementError(
            f"{local.running or 'the model'} fails on a part of the heads or features ({reason}). Does it take their "
            f"number from an attribute, a config or a buffer that placement does not know? {_REMEDY}"
        ) from local.error


_REMEDY = "leave out plan.placement.tensor, or the axis of it that cuts these features"


def _named(made: Made) -> str:
    return f"{made.module or 'the model'}: {made.function}"


def _compare_gathered(whole: Run, local: Run, gathered: Collection[str]) -> None:
    """What runs whole finds the features that it is given in the last dim, and nowhere else."""
    for path in gathered:
        for one, other in zip(whole.given[path], local.given.get(path, []), strict=False):
            differing = [dim for dim, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
            if len(one) != len(other) or differing not in ([], [len(one) - 1]):
                raise PlacementError(
                    f"{path}: must run on whole features, and is given {list(other)} of {list(one)}: expected features "
                    f"in the last dim, as linears have them; {_REMEDY}"
                )


def _compare_returned(whole: Run, local: Run) -> None:
    """What a loss is given by modules that it calls itself is whole."""
    for (path, one), (_, other) in zip(whole.returned, local.returned, strict=False):
        if one != other:
            raise PlacementError(
                f"{path}: the loss calls it, and would be given {_text(tuple(other))} of {_text(tuple(one))}: expected "
                "features in the last dim, which are gathered for a loss, or a call of the whole model; let the model "
                f"call it, or {_REMEDY}"
            )


ARRANGING = frozenset(
    "__getitem__ contiguous expand expand_as flatten permute repeat repeat_interleave reshape select squeeze transpose "
    "unflatten unsqueeze view view_as".split()
)
"""What code may leave out where there is nothing to arrange: a single key-value head need not be repeated."""


def _compare_calls(whole: Run, local: Run) -> None:
    """What computes runs in both, in the same order: nothing hangs on how many heads or features there are.

    Raises:
        PlacementError: names the first function that only one of them calls.
    """
    for module in dict.fromkeys(made.module for made in (*whole.made, *local.made)):
        ours, theirs = (
            [made for made in run.made if made.module == module and made.computes] for run in (whole, local)
        )
        for one, other in zip_longest(ours, theirs):
            if one is None or other is None or one.function != other.function:
                calls = [f"calls {made.function}" if made else "is done" for made in (one, other)]
                raise PlacementError(
                    f"{module or 'the model'}: {calls[0]} in the whole model, where on a part of its heads or features "
                    f"it {calls[1]}: its code asks how many there are. Let it do the same for any number; {_REMEDY}"
                )


def _matched(whole: Run, local: Run) -> Iterator[tuple[Made, Made]]:
    """Calls of the same function in the same module, in order.

    One of the two may call more where its code asks how many heads there are: a single key-value head need not be
    repeated.
    """
    if local.error is not None or [made[:2] for made in whole.made] == [made[:2] for made in local.made]:
        yield from zip(whole.made, local.made, strict=False)
        return
    for module in dict.fromkeys(made.module for made in whole.made):
        ours, theirs = ([made for made in run.made if made.module == module] for run in (whole, local))
        names = ([made.function for made in run] for run in (ours, theirs))
        for at, there, count in SequenceMatcher(None, *names, autojunk=False).get_matching_blocks():
            yield from zip(ours[at : at + count], theirs[there : there + count], strict=True)


def _fits(whole: tuple[Shape, ...], local: tuple[Shape, ...], pairs: Collection[tuple[int, int]]) -> bool:
    return len(whole) == len(local) and all(
        len(before) == len(after) and all(a == b or (a, b) in pairs for a, b in zip(before, after, strict=True))
        for before, after in zip(whole, local, strict=True)
    )


def _text(shapes: tuple[Shape, ...]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def cuts(
    whole: Run,
    local: Run,
    anatomy: Anatomy,
    dealing: Dealing,
    coordinates: Mapping[str, int],
    windows: Mapping[str, randomness.Window],
) -> dict[str, tuple[randomness.Cut, ...]]:
    """How the tensors that dropouts take are cut here, by site, besides by rows, which `windows` say."""
    axes = {dropout.site: dropout.axis for dropout in anatomy.dropouts}
    found: dict[str, tuple[randomness.Cut, ...]] = {}
    for site, shape in whole.draws.items():
        here, axis = local.draws.get(site, shape), axes.get(site)
        rows = anatomy.layouts.get(site, randomness.FIRST).dim if site in windows else -1
        differing = [dim for dim, (a, b) in enumerate(zip(shape, here, strict=True)) if a != b and dim != rows]
        if not differing:
            continue
        if axis is None or dealing.sizes[axis] == 1:  # time, which lies over the other axis
            axis = "y"
        found[site] = tuple(
            randomness.Cut(dim, dealing.runs(axis, shape[dim], here[dim], coordinates[axis]), shape[dim])
            for dim in differing
        )
    return found
