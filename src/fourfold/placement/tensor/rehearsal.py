"""A dry run of the split model beside the whole one: every shape must be the whole's, but for what is cut.

A count of heads that a module keeps to itself can fold heads into time and still run (`view(batch, -1, heads, width)`).
So every function that the model calls is compared, not the modules' outputs alone. Tensors have no values (or none that
matter), and the mesh is dry: nothing is allocated, nothing sent, and the bytes that would be sent are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
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
        total: the loss.
    """

    made: list[Made] = field(default_factory=list)
    draws: dict[str, Shape] = field(default_factory=dict)
    outputs: list[Shape] = field(default_factory=list)
    total: Any = None


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
        tensors = (value for value in leaves(result) if isinstance(value, Tensor) and value.is_floating_point())
        found.outputs = [tuple(value.shape) for value in tensors]

    with ExitStack() as stack:
        stack.callback(model.register_forward_hook(note).remove)
        for mode in (calls.watching(model), _Shapes(calls, opaque, found), rehearsal):
            stack.enter_context(mode)
        found.total = loss(model, dict(batch))
    found.draws = {site: tuple(seen.shape) for site, seen in sites(rehearsal.seen, calls.done, anatomy.blocks).items()}
    return found


def twins(
    model: nn.Module, batch: Mapping[str, Tensor], anatomy: Anatomy, dealing: Dealing, shapes: Mapping[str, Shape]
) -> tuple[nn.Module, nn.Module, dict[str, Tensor], Any]:
    """(whole, with blocks for weights, batch, mode): twins of the model on the kind of tensors that it runs on."""
    names = dealing.names
    kind = anatomy.traced
    fakes = torch_private.fake_mode() if kind == "fake" else None

    def empty(tensor: Tensor, shape: Shape | None = None) -> Tensor:
        shape = tuple(tensor.shape) if shape is None else shape
        if kind == "meta":
            return torch.empty(shape, dtype=tensor.dtype, device="meta")
        if fakes is not None:
            return torch_private.fake_cpu(fakes, torch.empty(shape, dtype=tensor.dtype, device="meta"))
        return torch.zeros(shape, dtype=tensor.dtype)

    def same(tensor: Tensor) -> Tensor:
        return tensor.detach().clone() if kind == "real" and not tensor.is_meta else empty(tensor)

    whole = twin(model, empty, same).train(model.training)
    local = twin(model, lambda weight: empty(weight, shapes[names[id(weight)]]), same).train(model.training)
    inputs = {name: same(tensor) for name, tensor in batch.items()}
    return whole, local, inputs, fakes or nullcontext()


def compare(whole: Run, local: Run, dealing: Dealing, coordinates: Mapping[str, int]) -> None:
    """Every shape of the split run is that of the whole run, but where a dim is one that is cut.

    Raises:
        PlacementError: names the module, the function and the two shapes.
    """
    pairs = dealing.pairs(coordinates)
    for one, other in zip(whole.made, local.made, strict=False):
        if one[:2] != other[:2]:
            raise PlacementError(
                f"{one.module}: calls {one.function} in the whole model and {other.function} on a part of its heads or "
                "features, so it cannot be cut; leave out plan.placement.tensor"
            )
        for before, after in zip(one.shapes, other.shapes, strict=False):
            if len(before) != len(after) or any(
                a != b and (a, b) not in pairs for a, b in zip(before, after, strict=True)
            ):
                raise PlacementError(
                    f"{one.module}: {one.function} gives {list(before)} in the whole model, and on a part of its heads "
                    f"or features {list(after)}, where other dims differ than those that are cut: does it count heads "
                    "by an attribute or a config that placement does not know? Leave out plan.placement.tensor"
                )


def cuts(
    whole: Run, local: Run, anatomy: Anatomy, dealing: Dealing, coordinates: Mapping[str, int]
) -> dict[str, tuple[randomness.Cut, ...]]:
    """How the tensors that dropouts take are cut here, by site."""
    axes = {one.site: one.axis for one in anatomy.dropouts}
    found: dict[str, tuple[randomness.Cut, ...]] = {}
    for site, shape in whole.draws.items():
        here, axis = local.draws.get(site, shape), axes.get(site)
        differing = [dim for dim, (a, b) in enumerate(zip(shape, here, strict=True)) if a != b]
        if not differing or axis is None:
            continue
        found[site] = tuple(
            randomness.Cut(dim, dealing.runs(axis, shape[dim], here[dim], coordinates[axis]), shape[dim])
            for dim in differing
        )
    return found
