"""Dropout whose mask is a function of (seed, step, site, logical element).

It reads the ambient `Position` of the rows being computed. Element e of local row r is element
(position.row + r) · (elements a row) + e of the site's stream, however micro-batches and ranks cut the rows. Which
elements are those of a row is a question of the tensor: dim 0 is made of whole rows (batch; batch × time; batch ×
heads) unless the position's `layouts`, which a survey of the model finds, say otherwise for the site.

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
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fourfold import torch_private
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
"""Without shapes and rows, so that it is shown once a site."""


class Position(NamedTuple):
    """Where in the logical run the rows being computed stand.

    Attributes:
        seed: of the run.
        step: optimizer step.
        row: logical index, inside the step's global batch, of the first local row.
        rows: number of local rows.
        layouts: of the sites whose rows do not lie as `FIRST` says, by site.
    """

    seed: int
    step: int
    row: int
    rows: int
    layouts: Mapping[str, Layout] = MappingProxyType({})


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
    """

    position: Position
    site: str
    row: int
    rows: int
    outer: int

    @classmethod
    def here(cls, x: Tensor, site: str) -> _Draw:
        """At the ambient position; a tensor without whole rows where they should be is drawn apart, with a warning.

        Nothing in the survey foretold it (an expert without tokens then, a length that follows the values), and a
        run must not end by it: what is lost is that other plans draw the same mask.
        """
        position, site = current(), _full(site)
        if position is None:
            raise RandomnessError(
                f"dropout at {site!r} outside of any position: enter fourfold.randomness.at(Position(...))"
            )
        dim, order = position.layouts.get(site, FIRST)
        if order == "shared":
            return cls(position, site, 0, 1, 1)
        misfit = order != "apart" and (dim >= x.dim() or x.shape[dim] % position.rows != 0)
        if misfit:
            warnings.warn(_MISFIT.format(site=site, dim=dim), stacklevel=2)
        if misfit or order == "apart":
            return cls(position, f"{site}@{position.row}", 0, 1, 1)
        outer = math.prod(x.shape[:dim]) * (x.shape[dim] // position.rows if order == "fastest" else 1)
        return cls(position, site, position.row, position.rows, outer)

    def laid_out(self, keep: Tensor, x: Tensor) -> Tensor:
        """A mask that was drawn row after row, in the order and shape of `x`."""
        if self.outer == 1 or x.numel() == 0:
            return keep.view(x.shape)
        return keep.view(self.rows, self.outer, -1).transpose(0, 1).reshape(x.shape)


def _keep_cpu(x: Tensor, p: float, site: str) -> Tensor:
    draw = _Draw.here(x, site)
    start = draw.row * (x.numel() // draw.rows)
    lanes = bits(draw.position.seed, draw.site, draw.position.step, start, x.numel())
    return draw.laid_out(torch.from_numpy(lanes >= threshold(p)), x)


def _keep_cuda(x: Tensor, p: float, site: str) -> Tensor:
    """One key a row, made on the host: (hash of seed, step, site and logical row; offset 0).

    A torch without stateless uniforms gets the mask of the CPU, copied: slower, and the same for every split of rows.
    """
    if not torch_private.has_stateless_uniform():
        return _keep_cpu(x, p, site).to(x.device)
    draw = _Draw.here(x, site)
    seed, step = draw.position.seed, draw.position.step
    names = (f"{seed}/{step}/{draw.site}/{draw.row + row}" for row in range(draw.rows))
    digests = [blake2b(name.encode(), digest_size=8).digest() for name in names]
    keys = np.array([[[int.from_bytes(digest, "little"), 0]] for digest in digests], dtype=np.uint64)
    drawn = torch.empty((draw.rows, x.numel() // draw.rows), dtype=torch.float32, device=x.device)
    torch_private.stateless_uniform(torch.from_numpy(keys).to(x.device), drawn)
    return draw.laid_out(drawn >= threshold(p) / LANES, x)


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
