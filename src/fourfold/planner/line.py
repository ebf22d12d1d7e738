"""A model as a line of layers, as the planner knows it: from one forward in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from fourfold.anatomy import survey
from fourfold.anatomy.layers import Layer, LayerError, Layers, Value, layers
from fourfold.placement.pipe.cuts import balanced, estimated, possible, said
from fourfold.placement.pipe.part import Part, Weight
from fourfold.placement.refusals import PlacementError
from fourfold.planner.subject import Subject
from fourfold.planner.trace import built


@dataclass(frozen=True)
class Line:
    """What can be cut into stages.

    Attributes:
        layers: of the model, without what they returned.
        estimated: costs by which a run cuts where its plan does not say (`cuts.estimated`).
        weights: every parameter of the model, by its own name, in the model's order.
    """

    layers: Layers
    estimated: tuple[float, ...]
    weights: dict[str, Weight]

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Line:
        """From what `lined` found.

        Raises:
            PlacementError: the model is no line of layers.
        """
        if "refused" in plain:
            raise PlacementError(plain["refused"])
        calls = tuple(Layer(path, _values(needs), frozenset(reads)) for path, needs, reads in plain["calls"])
        whole = Layers(calls, _values(plain["needs"]), frozenset(plain["reads"]))
        weights = {name: Weight(tuple(shape), trained) for name, shape, trained in plain["weights"]}
        return cls(whole, tuple(plain["estimated"]), weights)

    @property
    def paths(self) -> tuple[str, ...]:
        """Of the layers."""
        return tuple(layer.path for layer in self.layers.calls)

    def numel(self, name: str) -> int:
        """Elements of a weight."""
        return prod(self.weights[name].shape)

    def bounds(self, cut: Sequence[int] | None, stages: int) -> tuple[int, ...]:
        """Where a run cuts the line.

        Raises:
            PlacementError: it cannot be cut so.
        """
        if cut is not None:
            return said(tuple(cut), stages, self.layers)
        return balanced(self.estimated, stages, allowed=possible(self.layers))

    def part(self, bounds: Sequence[int], homes: Sequence[tuple[int, ...]], worker: int) -> Part:
        """A worker's part."""
        unread = frozenset(self.weights) - self.layers.weights(0, len(self.layers))
        return Part(self.layers, tuple(bounds), tuple(homes), worker, self.weights, unread)


def lined(subject: Subject) -> dict[str, Any]:
    """The line as plain JSON. To be called in a process of its own."""
    model = built(subject, real=False)
    anatomy = survey(model, subject.loss, subject.batch)
    try:
        found = layers(model, subject.loss, subject.batch, anatomy.blocks)
    except LayerError as error:
        return {"refused": f"plan.placement.pipe: {error}"}
    if found.looks:
        return {
            "refused": "plan.placement.pipe: the model's code between its layers cannot run again on another stage: "
            + "; ".join(found.looks)
        }
    return {
        "calls": [[layer.path, sorted(layer.needs), sorted(layer.reads)] for layer in found.calls],
        "needs": sorted(found.needs),
        "reads": sorted(found.reads),
        "estimated": estimated(model, found),
        "weights": [[name, list(one.shape), one.requires_grad] for name, one in model.named_parameters()],
    }


def _values(pairs: Sequence[Sequence[int]]) -> frozenset[Value]:
    return frozenset(Value(layer, leaf) for layer, leaf in pairs)
