"""One stage of a stock model runs: the model's own forward, in which the layers of other stages stand still.

Nothing of the model is rewritten. A stage calls the user's loss, which calls the model; layers of earlier stages return
what came from them (or a stand-in of the right shape, where nothing behind the cut asks for the value), the stage's own
layers compute, and at the first layer of the next stage the call is left. What the model does between layers (masks,
rotary tables, sums) is cheap and runs on every stage that it lies before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fourfold import randomness
from fourfold.anatomy.layers import Layers, Value
from fourfold.anatomy.nest import replaced, tensors
from fourfold.placement.pipe.bundle import Bundle, Look
from fourfold.placement.pipe.bundle import given as entered
from fourfold.placement.refusals import PlacementError
from fourfold.placement.tensor.between import Between
from fourfold.placement.uncopied import Uncopied

Result = TypeVar("Result")


class _Left(BaseException):
    """The stage is done. No `Exception`, so that no handler of the model's takes it."""


class Line(Uncopied):
    """A model's layers as gates: each knows, while a stage runs, whether it is that stage's."""

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        bounds: Sequence[int],
        blocks: Sequence[str],
        between: Between | None = None,
    ) -> None:
        """Take over the forwards of the layers' modules.

        Args:
            model: placed, or plain.
            layers: of the model.
            bounds: stage s has layers bounds[s] … bounds[s + 1] - 1.
            blocks: paths of the layers whose dropouts have scopes of their own.
            between: deals the rows or the time of a model whose features are cut.
        """
        self.between = between
        self.layers, self.bounds = layers, tuple(bounds)
        self._crossing = [layers.crossing(bound) for bound in self.bounds]
        self._blocks = frozenset(blocks)
        self._stage: int | None = None
        self._inside = False
        for path in dict.fromkeys(layer.path for layer in layers.calls):
            module = model.get_submodule(path)
            module.forward = partial(self._forward, path, module, module.forward)

    @property
    def stages(self) -> int:
        """How many."""
        return len(self.bounds) - 1

    def crossing(self, stage: int) -> tuple[Value, ...]:
        """What a stage is given by the one before it."""
        return self._crossing[stage]

    def run(self, stage: int, whole: Callable[[], Result], given: Bundle | None) -> Result | Bundle:
        """Run a stage.

        Args:
            stage: which.
            whole: runs the model and the loss.
            given: what the stage before gave; None for the first stage.

        Returns:
            What the next stage is given; of the last stage, what `whole` returned.

        Raises:
            PlacementError: the model ran other layers than those that it was surveyed with.
        """
        first = stage == 0
        assert (given is None) == first
        values = () if given is None else map(entered, given.values)
        self._given: dict[Value, Tensor] = dict(zip(self._crossing[stage], values, strict=True))
        self._looks: list[tuple[Look, ...]] = [] if given is None else list(given.looks)
        if given is not None:
            self.resume(given)
        self._made: dict[Value, Tensor] = {}
        self._number, self._stage = 0, stage
        try:
            result = whole()
        except _Left:
            return self._bundle(stage + 1)
        finally:
            self._stage = None
        if stage < self.stages - 1 or self._number < len(self.layers):
            raise self._other("the end")
        return result

    def _bundle(self, cut: int) -> Bundle:
        known = self._given | self._made
        extents = () if self.between is None else self.between.extents()
        return Bundle(tuple(known[value] for value in self._crossing[cut]), tuple(self._looks), extents)

    def resume(self, bundle: Bundle) -> None:
        """The micro-batch that this is of is computed, or computed again, from now on."""
        if self.between is not None:
            self.between.resume(bundle.extents)

    def _forward(self, path: str, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._stage is None or self._inside:
            return inner(*args, **kwargs)
        number = self._number
        if number >= len(self.layers) or self.layers.calls[number].path != path:
            raise self._other(path)
        if number == self.bounds[self._stage + 1]:
            raise _Left
        self._number += 1
        if number < self.bounds[self._stage]:
            return self._stand_in(number, path, module)
        self._inside = True
        try:
            result = inner(*args, **kwargs)
        finally:
            self._inside = False
        found = list(tensors(result))
        self._looks.append(tuple(map(Look.of, found)))
        self._made |= {Value(number, leaf): tensor for leaf, tensor in enumerate(found)}
        return result

    def _stand_in(self, number: int, path: str, module: nn.Module) -> Any:
        """What a layer of an earlier stage returned: what crossed, and shapes of what did not."""
        layer = self.layers.calls[number]
        if path in self._blocks:
            with randomness.inside(module, path):  # the names of what is drawn behind it say so
                pass
        else:
            randomness.skip(layer.draws)
        looks = self._looks[number]
        leaves = iter([self._given.get(Value(number, leaf), look) for leaf, look in enumerate(looks)])
        return replaced(layer.result, lambda _: _seen(next(leaves)))

    def _other(self, found: str) -> PlacementError:
        calls = self.layers.calls
        expected = calls[self._number].path if self._number < len(calls) else "the end"
        return PlacementError(
            f"layer {self._number} of the model: expected {expected}, as when it was surveyed, found {found}; a model "
            "whose layers differ from step to step cannot be cut into stages: use plan.placement.pipe: 1"
        )


def _seen(value: Tensor | Look) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.zeros((), dtype=value.dtype).expand(value.shape)
