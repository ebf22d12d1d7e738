"""A forward in which dropout is not drawn but noted: which sites there are, and what each is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.anatomy.blocks import Call, Calls
from fourfold.anatomy.rearranged import Place, Rearrangements
from fourfold.randomness import Streams
from fourfold.torch_private import inside_checkpoint

Shape = tuple[int, ...]


class Move(NamedTuple):
    """An operation that may put the rows of a batch in another order: "reshape", "cat" or "repeat".

    `dim` is that of a cat; `operands` and `result` are shapes.
    """

    kind: str
    operands: tuple[Shape, ...]
    result: Shape
    dim: int = 0


class Seen(NamedTuple):
    """A draw.

    Attributes:
        module: that it is in.
        clock: of the calls, at that time.
        moved: how often rows had been moved by then.
        shape: of the tensor that is dropped from.
        rearranged: what put the entries of that tensor in an order of its own.
    """

    module: str
    clock: int
    moved: int
    shape: Shape
    rearranged: frozenset[Place] = frozenset()


class Rehearsal(Streams):
    """Stands where the streams stand in training: all that they would replace is replaced, and leaves values alone.

    Attributes:
        seen: the draws, in order.
        repeated: modules that draw inside a `torch.utils.checkpoint` of the model's own.
        moves: what moved rows, by module and ordinal in it, in order; a `Watch` notes them.
        rearrangements: what put entries in an order of its own; a `Watch` notes them.
        running: the function that the model's own code has called; None between calls.
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__("")
        self.calls = calls
        self.seen: list[Seen] = []
        self.repeated: set[str] = set()
        self.moves: dict[Place, Move] = {}
        self.rearrangements = Rearrangements()
        self.running: Callable | None = None
        self._operands: Any = ()

    def draw(self, x: Tensor, p: float) -> Tensor:
        """Note the draw; a copy of `x`."""
        self._note(x.shape)
        return x.clone()

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        outer, self.running = self.running, func
        operands, self._operands = self._operands, args[:3] or kwargs  # of attention: without its mask
        try:
            if func is F.scaled_dot_product_attention:
                return self._attention(*args, **(kwargs or {}))
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            self.running, self._operands = outer, operands

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **settings: Any,
    ) -> Tensor:
        """The draw is for the attention's weights, which need not be computed to know their shape."""
        if dropout_p > 0.0:
            rows = (
                query.shape[:-2]
                if settings.get("enable_gqa")
                else torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
            )
            self._note((*rows, query.shape[-2], key.shape[-2]))
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **settings)

    def _note(self, shape: Sequence[int]) -> None:
        if inside_checkpoint():
            self.repeated.add(self.calls.inside)
        rearranged = self.rearrangements.of(self._operands)
        self.seen.append(Seen(self.calls.inside, self.calls.clock, len(self.moves), tuple(shape), rearranged))


def sites(seen: list[Seen], done: list[Call], blocks: Collection[str]) -> dict[str, Seen]:
    """The draws by the names of their sites, as `randomness.inside` gives them around the blocks and the whole model.

    Args:
        seen: the draws in order.
        done: the calls of the same forward.
        blocks: paths of the blocks; each ran once.
    """
    spans = sorted((call for call in done if call.path in blocks), key=lambda call: call.start)
    drawn: Counter[str] = Counter()
    named: dict[str, Seen] = {}
    for one in seen:
        scope = ""
        for call in spans:
            if call.start <= one.clock < call.stop:
                scope = call.path
            elif call.stop <= one.clock:
                scope = f">{call.path}"
        named[f"{scope}#{drawn[scope]}"] = one
        drawn[scope] += 1
    return named
