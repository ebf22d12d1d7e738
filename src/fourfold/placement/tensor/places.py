"""Which of the tensors that a module is given have features, or rows: by their places among its arguments.

A size cannot tell: a mask of as many tokens as there are features, or as there are rows, has neither. So it is decided
before the first step, where the whole model and a part of it, or batches of different numbers of rows, tell them apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.anatomy import Anatomy
from fourfold.placement.tensor import rehearsal
from fourfold.placement.tensor.rehearsal import Run, Shape, Stage
from fourfold.torch_private import leaves


@dataclass(frozen=True)
class Places:
    """What was found in a rehearsal, by path of a module.

    Attributes:
        features: places among the floating tensors that a module that runs whole is given, of those with the features
            that are gathered for it.
        rows: places among the tensors that a module with a block's first linears is given, of those whose first dim
            has the rows of the batch.
    """

    features: dict[str, frozenset[int]] = field(default_factory=dict)
    rows: dict[str, frozenset[int]] = field(default_factory=dict)

    def see_whole(self, whole: Run, widths: Mapping[str, tuple[int, int]]) -> None:
        """Before a part of the model is run: every tensor that has as many features as the first may have them."""
        for path, (width, _) in widths.items():
            shapes = whole.given.get(path, [])
            self.features[path] = frozenset(place for place, shape in enumerate(shapes) if shape[-1:] == (width,))

    def see_part(self, whole: Run, local: Run) -> None:
        """Those that have another size in a part of the model have them."""
        for path, places in self.features.items():
            pairs = list(zip(whole.given.get(path, []), local.given.get(path, []), strict=False))
            if pairs:
                self.features[path] = frozenset(one for one in places if pairs[one][0][-1] != pairs[one][1][-1])


def with_rows(stage: Stage, anatomy: Anatomy, paths: Iterable[str]) -> dict[str, frozenset[int]]:
    """`Places.rows` of these modules: of what they are given in two runs, one of twice as many rows as the other."""
    paths = tuple(paths)
    once, twice = (_given(stage, anatomy, paths, times) for times in (1, 2))
    return {
        path: frozenset(
            place
            for place, (one, two) in enumerate(zip(once[path], twice[path], strict=False))
            if one[:1] != two[:1] and one[1:] == two[1:]
        )
        for path in paths
        if path in once and path in twice
    }


def _given(stage: Stage, anatomy: Anatomy, paths: tuple[str, ...], times: int) -> dict[str, list[Shape]]:
    """Shapes of the tensors that modules are given, of so many copies of the example."""
    batch = {name: torch.cat([tensor] * times) if tensor.dim() else tensor for name, tensor in stage.batch.items()}
    stage = dataclasses.replace(stage, batch=batch)
    found: dict[str, list[Shape]] = {}

    def note(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        found[path] = [tuple(leaf.shape) for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]

    with ExitStack() as stack:
        stack.enter_context(stage.entered())
        model = stage.twin({})
        for path in paths:
            module = model.get_submodule(path)
            stack.callback(module.register_forward_pre_hook(partial(note, path), with_kwargs=True).remove)
        run = rehearsal.run(model, stage.loss, stage.inputs(), anatomy, frozenset())
    if run.error is not None:
        raise run.error
    return found
