"""Which stages of a model a rank holds, and what it has in common with others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import nn

from fourfold.anatomy.layers import Layers


class Weight(NamedTuple):
    """A logical weight: its shape, and whether it is trained."""

    shape: tuple[int, ...]
    trained: bool


@dataclass(frozen=True)
class Part:
    """One worker's part of a pipeline.

    Attributes:
        layers: of the model.
        bounds: stage s has layers bounds[s] … bounds[s + 1] - 1.
        homes: of every stage, the workers that hold it (two, where a schedule runs it in both directions).
        worker: which one this is.
        weights: every parameter of the model, by its own name, in the model's order.
        unread: those that no layer reads: the first stage has them.
        splits: backward runs in two halves, by the input and by the weight.
    """

    layers: Layers
    bounds: tuple[int, ...]
    homes: tuple[tuple[int, ...], ...]
    worker: int
    weights: dict[str, Weight]
    unread: frozenset[str]
    splits: bool = False

    @classmethod
    def of(
        cls,
        model: nn.Module,
        layers: Layers,
        bounds: Sequence[int],
        homes: Sequence[tuple[int, ...]],
        worker: int,
        *,
        splits: bool = False,
    ) -> Part:
        """The part of `worker`."""
        weights = {name: Weight(tuple(one.shape), one.requires_grad) for name, one in model.named_parameters()}
        unread = frozenset(weights) - layers.weights(0, len(layers))
        return cls(layers, tuple(bounds), tuple(homes), worker, weights, unread, splits)

    @property
    def stages(self) -> tuple[int, ...]:
        """Those that the worker holds."""
        return tuple(stage for stage, homes in enumerate(self.homes) if self.worker in homes)

    @property
    def paths(self) -> list[str]:
        """Of the layers that run on the worker."""
        spans = (range(self.bounds[stage], self.bounds[stage + 1]) for stage in self.stages)
        return list(dict.fromkeys(self.layers.calls[number].path for span in spans for number in span))

    @property
    def ends(self) -> bool:
        """The worker holds the last stage."""
        return self.worker in self.homes[-1]

    @cached_property
    def reads(self) -> tuple[frozenset[str], ...]:
        """The weights that each stage reads."""
        cuts = zip(self.bounds, self.bounds[1:], strict=False)
        first, *others = (self.layers.weights(*cut) for cut in cuts)
        return (first | self.unread, *others)

    def uses(self, name: str) -> tuple[int, ...]:
        """The stages that read a weight."""
        return tuple(stage for stage, names in enumerate(self.reads) if name in names)

    def readers(self, names: Iterable[str]) -> frozenset[int]:
        """The stages of this worker that read one of these weights."""
        return frozenset(stage for name in names for stage in self.uses(name) if stage in self.stages)

    def holders(self, name: str) -> tuple[int, ...]:
        """The workers that hold a weight, that of its first stage first."""
        return tuple(dict.fromkeys(worker for stage in self.uses(name) for worker in self.homes[stage]))

    @property
    def copied(self) -> list[str]:
        """Weights of this worker that another one counts, and writes to checkpoints."""
        return [name for name, who in self.shared.items() if who[0] != self.worker]

    def held(self, stage: int) -> frozenset[str]:
        """The weights whose first stage on this worker is `stage`."""
        earlier = frozenset[str]().union(*(self.reads[other] for other in self.stages if other < stage))
        return self.reads[stage] - earlier

    @cached_property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Weights that this worker and others hold, and who: their gradients are summed."""
        found = {name: self.holders(name) for name in self.weights}
        return {name: who for name, who in found.items() if len(who) > 1 and self.worker in who}

    def home(self, path: str) -> int:
        """The worker that the buffers of a module are right on: that of its layer, else of the first stage."""
        for number, layer in enumerate(self.layers.calls):
            if f"{path}.".startswith(f"{layer.path}."):
                stage = next(stage for stage, end in enumerate(self.bounds[1:]) if number < end)
                return self.homes[stage][0]
        return self.homes[0][0]
