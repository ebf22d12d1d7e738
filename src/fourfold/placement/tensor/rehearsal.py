"""A dry run of the split model beside the whole one: every shape must be the whole's, but for what is cut.

A count of heads that a module keeps to itself can fold heads into time and still run (`view(batch, -1, heads, width)`).
So every function that the model calls is compared, not the modules' outputs alone. Tensors have no values (or none that
matter), and the mesh is dry: nothing is allocated, nothing sent, and the bytes that would be sent are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
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
from fourfold.torch_private import leaves

Shape = tuple[int, ...]
Loss = Callable[[nn.Module, Any], Any]


class Made(NamedTuple):
    """What one call of a torch function gave: in which module, which function, shapes of the results."""

    module: str
    function: str
    shapes: tuple[Shape, ...]


@dataclass
class Run:
    """What one forward came to.

    Attributes:
        made: every function called outside of the modules that executors take over.
        draws: dropout site → shape of what is dropped from.
        outputs: shapes of the floating tensors that the model returned.
        widths: module path → features of the first floating tensor that it is given, and that it gives; of those asked.
    """

    made: list[Made] = field(default_factory=list)
    draws: dict[str, Shape] = field(default_factory=dict)
    outputs: list[Shape] = field(default_factory=list)
    widths: dict[str, tuple[int, int]] = field(default_factory=dict)


class _Shapes(TorchFunctionMode):
    def __init__(self, calls: Calls, opaque: frozenset[str], run: Run) -> None:
        super().__init__()
        self.calls, self.opaque, self.run = calls, opaque, run

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inside = self.calls.inside
        if inside and not any(inside == path or inside.startswith(f"{path}.") for path in self.opaque):
            shapes = tuple(tuple(value.shape) for value in leaves(result) if isinstance(value, Tensor))
            name = getattr(func, "__name__", str(func))
            if shapes and name != "__get__":
                self.run.made.append(Made(inside, name, shapes))
        return result


def run(model: nn.Module, loss: Loss, batch: Mapping[str, Tensor], anatomy: Anatomy, opaque: frozenset[str]) -> Run:
    """One forward of a twin; shapes are noted outside of the modules `opaque`."""
    found, calls = Run(), Calls()
    rehearsal = Rehearsal(calls)

    def note(module: nn.Module, args: Any, result: Any) -> None:
        found.outputs = [tuple(value.shape) for value in _floating(result)]

    def measure(path: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        given, made = _floating((args, kwargs)), _floating(result)
        found.widths[path] = given[0].shape[-1], made[0].shape[-1]

    with ExitStack() as stack:
        stack.callback(model.register_forward_hook(note).remove)
        for path in anatomy.whole:
            hook = model.get_submodule(path).register_forward_hook(partial(measure, path), with_kwargs=True)
            stack.callback(hook.remove)
        for mode in (calls.watching(model), _Shapes(calls, opaque, found), rehearsal):
            stack.enter_context(mode)
        loss(model, dict(batch))
    found.draws = {site: tuple(seen.shape) for site, seen in sites(rehearsal.seen, calls.done, anatomy.blocks).items()}
    return found


def _floating(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


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


def compare(whole: Run, local: Run, dealing: Dealing, coordinates: Mapping[str, int]) -> None:
    """Every shape of the split run is that of the whole run, but where a dim is one that is cut.

    Raises:
        PlacementError: names the module, the function and the two shapes.
    """
    pairs = dealing.pairs(coordinates)
    for one, other in _matched(whole.made, local.made):
        if not _fits(one.shapes, other.shapes, pairs):
            raise PlacementError(
                f"{one.module}: {one.function} gives {_text(one.shapes)} in the whole model, and {_text(other.shapes)} "
                "on a part of its heads or features: other dims differ than those that are cut. Does it count heads by "
                "an attribute or a config that placement does not know? Leave out plan.placement.tensor"
            )


def _matched(whole: Sequence[Made], local: Sequence[Made]) -> Iterator[tuple[Made, Made]]:
    """Calls of the same function in the same module, in order.

    One of the two may call more where its code asks how many heads there are: a single key-value head need not be
    repeated.
    """
    if [made[:2] for made in whole] == [made[:2] for made in local]:
        yield from zip(whole, local, strict=True)
        return
    for module in dict.fromkeys(made.module for made in whole):
        ours, theirs = ([made for made in run if made.module == module] for run in (whole, local))
        names = ([made.function for made in run] for run in (ours, theirs))
        for at, there, count in SequenceMatcher(None, *names, autojunk=False).get_matching_blocks():
            yield from zip(ours[at : at + count], theirs[there : there + count], strict=True)


def _fits(whole: tuple[Shape, ...], local: tuple[Shape, ...], pairs: set[tuple[int, int]]) -> bool:
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
