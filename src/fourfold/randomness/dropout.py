"""Dropout whose mask is a function of (seed, step, site, logical element).

It reads the ambient `Position` of the rows being computed. Element e of local row r is element
(position.row + r) · (elements a row) + e of the site's stream, however micro-batches and ranks cut the rows. Which
elements are those of a row is a question of the tensor: dim 0 is made of whole rows (batch; batch × time; batch ×
heads) unless the position's `layouts`, which a survey of the model finds, say otherwise for the site. Where a tensor
grid cuts other dims, `cuts` say which part of a row is here: its elements keep the numbers that they have in the whole.

On CUDA the generator is torch's stateless Philox with one key a row: other masks than on CPU, but again equal for
every plan on that kind of device. That kernel is written for real and was never run: its calls and shapes are tested
on meta tensors only.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fourfold import torch_private
from fourfold.randomness.cut import Cut, Part
from fourfold.randomness.philox import RandomnessError, bits

LANES = 1 << 16
"""A mask compares 16-bit lanes: probabilities are multiples of 1/65536."""


class Layout(NamedTuple):
    """How the rows lie in the tensor that one site drops from.

    Attributes:
        dim: the dim that holds them; of no meaning for "shared" and "apart".
        order: "slowest": the dim is made of whole rows, one after the other (batch × heads); "fastest": neighbours in
            the dim belong to neighbouring rows (time × batch); "shared": the tensor has no rows, so that every rank
            and micro-batch needs the very same mask; "apart": nobody knows, so every part of a batch draws its own.
    """

    dim: int
    order: str


FIRST = Layout(0, "slowest")
"""Of sites that are not listed: whole rows in dim 0."""


_MISFIT = (
    "not exact: dropout at {site!r}: dim {dim} of its tensor does not hold whole rows of the batch, as it did in the "
    "survey of the model, so every part of a batch draws its own mask; put the batch first where this layer is called, "
    "or give an example batch that runs every part of the model"
)
_MISCUT = (
    "not exact: dropout at {site!r}: its tensor does not hold the part of every row that the plan gives this rank, so "
    "every part of a batch draws its own mask; give an example batch that runs every part of the model"
)
"""Both without shapes and rows, so that they are shown once a site."""


class Window(NamedTuple):
    """Which part of the rows being computed a tensor holds: number `part`, from 0, of `parts`.

    They are as even as can be: the first ones have one row more.
    """

    part: int
    parts: int


class Position(NamedTuple):
    """Where in the logical run the rows being computed stand.

    Attributes:
        seed: of the run.
        step: optimizer step.
        row: logical index, inside the step's global batch, of the first local row.
        rows: number of local rows.
        layouts: of the sites whose rows do not lie as `FIRST` says, by site.
        cuts: of the sites whose tensor is cut along other dims than the rows, by site. A cut of a dim that the tensor
            does not have is passed over: channel dropout draws [rows, channels], whatever a channel holds.
        windows: of the sites whose tensor holds a part of these rows only, by site.
    """

    seed: int
    step: int
    row: int
    rows: int
    layouts: Mapping[str, Layout] = MappingProxyType({})
    cuts: Mapping[str, tuple[Cut, ...]] = MappingProxyType({})
    windows: Mapping[str, Window] = MappingProxyType({})

    def seen_by(self, site: str) -> Position:
        """With the rows that the tensor at this site holds."""
        window = self.windows.get(site)
        if window is None:
            return self
        each, more = divmod(self.rows, window.parts)
        first = window.part * each + min(window.part, more)
        return self._replace(row=self.row + first, rows=each + (window.part < more))


class _Ambient(threading.local):
    position: Position | None = None
    scope: str = ""


_ambient = _Ambient()


def current() -> Position | None:
    """The ambient position of this thread.

    Autograd runs CUDA's backward in threads of its own: whoever recomputes there captures the position in the forward
    and enters `at` again inside the recomputed function.
    """
    return _ambient.position


@contextmanager
def at(position: Position | None) -> Iterator[None]:
    """Everything computed inside, on this thread, is at `position` (None: nowhere, torch's own generators)."""
    before, _ambient.position = _ambient.position, position
    try:
        yield
    finally:
        _ambient.position = before


def enter_scope(name: str) -> str:
    """Sites that begin with "#" are sites of the scope `name` from here on, on this thread; returns the scope before.

    The scope is looked up when the op runs, so compiled graphs of equal blocks hold equal sites and are shared.
    """
    before, _ambient.scope = _ambient.scope, name
    return before


def threshold(p: float) -> int:
    """Lanes below this are dropped: p in units of 1/65536, rounded. The scale uses the rounded p: means are exact."""
    if not 0.0 <= p <= 1.0:
        raise RandomnessError(f"dropout probability {p}: expected 0 ≤ p ≤ 1")
    return round(p * LANES)


def _full(site: str) -> str:
    return _ambient.scope + site if site.startswith("#") else site


def _scale(p: float) -> float:
    kept = LANES - threshold(p)
    return LANES / kept if kept else 0.0


class _Draw(NamedTuple):
    """What a site draws here: rows [row, row + rows) of the stream `site`, `outer` runs of every row side by side.

    The mask in memory is (outer, rows, inner): a row's elements, in order, are its `outer` runs of `inner` elements.
    `part` says which elements of a row these are; None: all.
    """

    position: Position
    site: str
    row: int
    rows: int
    outer: int
    part: Part | None = None

    @classmethod
    def here(cls, x: Tensor, site: str) -> _Draw:
        """At the ambient position; a tensor without whole rows where they should be is drawn apart, with a warning.

        Nothing in the survey foretold it (an expert without tokens then, a length that follows the values), and a
        run must not end by it: what is lost is that other plans draw the same mask. Ranks that hold the same rows draw
        the same: should the tensor be whole on all of them, they stay equal.
        """
        position, site = current(), _full(site)
        if position is None:
            raise RandomnessError(
                f"dropout at {site!r} outside of any position: enter fourfold.randomness.at(Position(...))"
            )
        position = position.seen_by(site)
        dim, order = position.layouts.get(site, FIRST)
        draw, shape = cls(position, site, 0, 1, 1), list(x.shape)
        apart = draw._replace(site=f"{site}@{position.row}")
        if order == "apart":
            draw = apart
        elif order != "shared":
            if dim >= x.dim() or x.shape[dim] % position.rows != 0:
                warnings.warn(_MISFIT.format(site=site, dim=dim), stacklevel=2)
                return apart
            shape[dim] //= position.rows
            outer = math.prod(shape[: dim + 1] if order == "fastest" else shape[:dim])
            draw = draw._replace(row=position.row, rows=position.rows, outer=outer)
        cuts = [cut for cut in position.cuts.get(site, ()) if cut.dim < x.dim()]
        if not cuts:
            return draw
        part = Part.of(shape, cuts)
        if part is None:
            warnings.warn(_MISCUT.format(site=site), stacklevel=2)
            return apart
        return draw._replace(part=part)

    def laid_out(self, keep: Tensor, x: Tensor) -> Tensor:
        """A mask that was drawn row after row, in the order and shape of `x`."""
        if self.outer == 1 or x.numel() == 0:
            return keep.view(x.shape)
        return keep.view(self.rows, self.outer, -1).transpose(0, 1).reshape(x.shape)


def _keep_cpu(x: Tensor, p: float, site: str) -> Tensor:
    draw, dropped = _Draw.here(x, site), threshold(p)
    lanes = partial(bits, draw.position.seed, draw.site, draw.position.step)
    if draw.part is None:
        keep = lanes(draw.row * (x.numel() // draw.rows), x.numel()) >= dropped
    else:
        keep = draw.part.keep(lanes, draw.row, draw.rows, dropped)
    return draw.laid_out(torch.from_numpy(keep), x)


def _keep_cuda(x: Tensor, p: float, site: str) -> Tensor:
    """One key a row, made on the host: (hash of seed, step, site and logical row; offset 0).

    A row of which a part is here is drawn whole, for a key has no offset in the middle: one row at a time, so that no
    more than one is ever held. A torch without stateless uniforms gets the mask of the CPU, copied: slower, and the
    same for every split of rows.
    """
    if not torch_private.has_stateless_uniform():
        return _keep_cpu(x, p, site).to(x.device)
    draw, dropped = _Draw.here(x, site), threshold(p) / LANES
    seed, step = draw.position.seed, draw.position.step
    names = (f"{seed}/{step}/{draw.site}/{draw.row + row}" for row in range(draw.rows))
    digests = [blake2b(name.encode(), digest_size=8).digest() for name in names]
    numbers = np.array([[[int.from_bytes(digest, "little"), 0]] for digest in digests], dtype=np.uint64)
    keys = torch.from_numpy(numbers).to(x.device)
    if draw.part is None:
        return draw.laid_out(_uniform(keys, (x.numel() // draw.rows,)) >= dropped, x)
    rows = [draw.part.take(_uniform(key, draw.part.whole)[0]) >= dropped for key in keys.split(1)]
    return draw.laid_out(torch.stack(rows), x)


def _uniform(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[rows, *shape] on [0, 1), float32: a row a key."""
    drawn = torch.empty((len(keys), math.prod(shape)), dtype=torch.float32, device=keys.device)
    torch_private.stateless_uniform(keys, drawn)
    return drawn.view(-1, *shape)


def _dropped(x: Tensor, keep: Tensor, p: float) -> Tensor:
    return (x * keep).mul_(_scale(p))


# A dispatcher op with one kernel a device: a compiled graph holds it whole, and it reads the position when it runs.
_library = torch.library.Library("fourfold", "FRAGMENT")
_library.define("dropout(Tensor x, float p, str site) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl(_library, "dropout", "CPU")
def _dropout_cpu(x: Tensor, p: float, site: str) -> tuple[Tensor, Tensor]:
    keep = _keep_cpu(x, p, site)
    return _dropped(x, keep, p), keep


@torch.library.impl(_library, "dropout", "CUDA")
def _dropout_cuda(x: Tensor, p: float, site: str) -> tuple[Tensor, Tensor]:
    keep = _keep_cuda(x, p, site)
    return _dropped(x, keep, p), keep


@torch.library.register_fake("fourfold::dropout", lib=_library)
def _dropout_fake(x: Tensor, p: float, site: str) -> tuple[Tensor, Tensor]:
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    return x * keep, keep


def _remember(ctx, inputs: tuple[Tensor, float, str], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])
    ctx.p = inputs[1]


def _backward(ctx, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:
    (keep,) = ctx.saved_tensors
    return _dropped(gradient, keep, ctx.p), None, None


torch.library.register_autograd("fourfold::dropout", _backward, setup_context=_remember, lib=_library)


def dropout(x: Tensor, p: float, site: str) -> Tensor:
    """Dropout at the ambient position: zero with probability p, else scaled by 1/(1 − p). Saves the bool mask alone."""
    return torch.ops.fourfold.dropout(x, p, site)[0]
