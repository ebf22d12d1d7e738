"""The storage of one unit: its shard, its full arena, and the copies between messages and arenas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fourfold.placement.cut import Fill
from fourfold.placement.layout import LINE, Layout, Slot
from fourfold.placement.precision import Precision


class Arena:
    """Flat storages of a unit's weights.

    Attributes:
        shard: [layout.size] master values of the rows that this rank holds; padding is zero.
        gradient: [layout.trained] summed gradient of the trained prefix of the shard.
        summed: the gradient, and behind it whatever travels with it (`seats`).
        full: [layout.full] weights as compute sees them; each weight contiguous. Its storage may be empty (freed).
        rest: [layout.full] weights as they rest between uses, or None where nothing but the shard rests.

    With one part and one element type, shard, rest and full are one storage.
    """

    def __init__(
        self,
        layout: Layout,
        precision: Precision,
        index: int,
        *,
        resident: bool,
        device: torch.device,
        passengers: int = 0,
    ):
        """Allocate.

        Args:
            layout: what lies where.
            precision: the element types.
            index: which part of the shards is this rank's.
            resident: the full weights rest on every rank (everything but sharded parameters).
            device: where.
            passengers: elements that travel behind the gradient.
        """
        self.layout, self.precision, self.index = layout, precision, index
        self.shard = torch.zeros(layout.size, dtype=precision.master, device=device)
        self.summed = torch.zeros(layout.trained + passengers, dtype=precision.master, device=device)
        self.gradient = self.summed[: layout.trained]
        self.transient = precision.upcast or not resident
        one = layout.parts == 1
        self.rest: Tensor | None = None
        if resident:
            shared = one and precision.message == precision.master
            self.rest = self.shard if shared else torch.zeros(layout.full, dtype=precision.message, device=device)
        if self.transient or self.rest is None:
            self.full = torch.zeros(layout.full, dtype=precision.compute, device=device)
        else:
            self.full = self.rest
        self._bytes = self.full.untyped_storage().nbytes()
        # Autograd saves weights for backward and compares version counters: writes go through an alias with its own.
        self._writable = self.full.data
        self.free()

    @property
    def live(self) -> bool:
        """The full weights are in memory."""
        return self.full.untyped_storage().nbytes() == self._bytes

    def allocate(self) -> None:
        """Give the full arena its storage (contents undefined)."""
        if self.transient and not self.live:
            self.full.untyped_storage().resize_(self._bytes)

    def free(self) -> None:
        """Take the full arena's storage away. The weights keep their shape and type."""
        if self.transient:
            self.full.untyped_storage().resize_(0)

    def views(self) -> dict[str, Tensor]:
        """The weights in the full arena, by name, in their blocks' shapes."""
        return {
            slot.name: self.full[slot.full_start : slot.full_start + slot.numel].view(slot.shape)
            for slot in self.layout.slots
        }

    # ---- weights

    def message(self) -> Tensor:
        """[layout.size] what this rank sends in a gather of its shard."""
        return self.shard.to(self.precision.message)

    def staging(self, size: int) -> Tensor:
        """[parts, size] room for the gathered shards."""
        return torch.empty(self.layout.parts, size, dtype=self.precision.message, device=self.shard.device)

    def unpack(self, staged: Tensor, *, into_rest: bool = False) -> None:
        """Copy gathered shards [parts, prefix] to where each weight is contiguous."""
        target = self._writable if not into_rest or self.rest is None else self.rest.data
        slots = [slot for slot in self.layout.slots if slot.shard_start < staged.shape[1]]
        parts = self.layout.parts
        places = [target[s.full_start : s.full_start + s.used * parts].view(parts, s.used) for s in slots]
        if target.dtype != staged.dtype:
            for slot, place in zip(slots, places, strict=True):
                place.copy_(staged[:, slot.shard_start : slot.shard_start + slot.used])
            return
        if self.layout.padded:
            # Between two ranks' rows there is no room for padding.
            places = _interleaved(places, slots, staged.new_empty(parts * LINE))
        torch.split_with_sizes_copy(staged, [place.shape[1] for place in places], dim=1, out=places)

    def expand(self) -> None:
        """Compute weights from the resting ones (another element type)."""
        assert self.rest is not None
        self._writable.copy_(self.rest)

    def fill(self, fill: Fill) -> None:
        """Set the shard, and the resting full weights, from a source of logical weights; no communication."""
        dtype = self.precision.master
        with torch.no_grad():
            for slot in self.layout.slots:
                first, last = slot.span(self.index)
                mine = self.shard[slot.shard_start : slot.shard_start + last - first]
                slot.block.read(fill, slot.name, first, mine, dtype)
                if self.rest is not None and self.rest is not self.shard:
                    whole = self.rest[slot.full_start : slot.full_start + slot.numel]
                    slot.block.read(fill, slot.name, 0, whole, dtype)

    # ---- gradients

    def segments(self) -> list[Tensor]:
        """The summed gradient of each trained weight's rows on this rank, of those that it owns."""
        owned = (slot for slot in self.layout.trained_slots if slot.block.owned)
        return [self.gradient[slot.shard_start : slot.shard_start + slot.segment] for slot in owned]

    def places(self) -> list[Tensor]:
        """One part: where each trained weight's gradient lies in `gradient`, in its block's shape."""
        return [self.gradient[s.shard_start : s.shard_start + s.numel].view(s.shape) for s in self.layout.trained_slots]

    def pack(self, gradients: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
        """Lay full gradients (in the order of `trained_slots`) out as a message [parts, layout.trained].

        A missing gradient, and padding, count as zero.
        """
        layout = self.layout
        message = torch.empty(layout.parts, layout.trained, dtype=dtype, device=self.shard.device)
        if layout.even and _alike(gradients, dtype):
            columns = [gradient.reshape(layout.parts, -1) for gradient in gradients if gradient is not None]
            if layout.padded:
                columns = _interleaved(columns, layout.trained_slots, message.new_zeros(layout.parts * LINE))
            torch.cat(columns, dim=1, out=message)
            return message
        for slot, gradient in zip(layout.trained_slots, gradients, strict=True):
            _deal(gradient, slot.used, message[:, slot.shard_start : slot.shard_start + slot.segment])
        return message


def _alike(gradients: Sequence[Tensor | None], dtype: torch.dtype) -> bool:
    return bool(gradients) and all(gradient is not None and gradient.dtype == dtype for gradient in gradients)


def _interleaved(columns: Sequence[Tensor], slots: Sequence[Slot], spare: Tensor) -> list[Tensor]:
    """Columns [parts, used] of segments, each with its padding behind it: columns [parts, padding] of `spare`."""
    result: list[Tensor] = []
    for column, slot in zip(columns, slots, strict=True):
        result.append(column)
        if slot.padding:
            parts = column.shape[0]
            result.append(spare[: parts * slot.padding].view(parts, slot.padding))
    return result


def _deal(gradient: Tensor | None, used: int, segments: Tensor) -> None:
    """Deal a gradient's elements out to segments [parts, segment], `used` to each; what gets none is zero."""
    if gradient is None or not used:
        segments.zero_()
        return
    flat = gradient.reshape(-1)
    whole, rest = divmod(flat.numel(), used)
    segments[:whole, :used].copy_(flat[: whole * used].view(whole, used))
    segments[:whole, used:].zero_()
    segments[whole:].zero_()
    if rest:
        segments[whole, :rest].copy_(flat[whole * used :])
