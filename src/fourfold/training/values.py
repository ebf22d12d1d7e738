"""Where a run's first weights come from: what the model holds, or what its recorded initialisers draw."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fourfold.anatomy import InitialiserError, initialiser, recorded
from fourfold.placement.arena import Fill
from fourfold.wire import Mesh


class ValuesError(ValueError):
    """A model whose weights have no values, or that differs between ranks: names the weight and what to try."""


@dataclass
class Drawn:
    """The values of a deferred model, drawn by its recorded initialisers at this seed.

    What cannot be drawn in part (orthogonal weights) is drawn whole, and kept until another such weight is asked for.
    """

    model: nn.Module
    seed: int
    _whole: tuple[str, Tensor] | None = field(default=None, init=False, repr=False)

    def __call__(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Flat elements [start, stop) of the logical weight `name`."""
        drawn = initialiser(self.model, name)
        if not drawn.whole:
            return drawn.values(self.seed, start, stop, dtype)
        if self._whole is None or self._whole[0] != name:
            self._whole = name, drawn.values(self.seed, 0, torch.Size(drawn.shape).numel())
        return self._whole[1][start:stop].to(dtype)


@torch.no_grad()
def fill_buffers(model: nn.Module, seed: int) -> None:
    """Give a deferred model's buffers their values: they are small, and no initialiser of a weight needs them."""
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            values = initialiser(model, name).values(seed, 0, buffer.numel(), buffer.dtype).view(buffer.shape)
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner)._buffers[attribute] = values


def values_of(model: nn.Module, mesh: Mesh, seed: int) -> Fill:
    """The source of a model's first weights: itself, or for a model made by `fourfold.deferred` its initialisers.

    Raises:
        ValuesError: weights without values, or with other values on another rank.
    """
    meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if not meta:
        return _held(model, mesh)
    try:
        recorded(model)
    except InitialiserError as error:
        raise ValuesError(
            f"model: {len(meta)} parameters have no values (on the meta device), the first is {meta[0]!r}; build it by "
            "fourfold.deferred(lambda: ...) or on the CPU, or give parallelize `weights`"
        ) from error
    return Drawn(model, seed)


def _held(model: nn.Module, mesh: Mesh) -> Fill:
    """The values that the model holds, once it is certain that every rank holds the same, buffers included."""
    flat = {name: parameter.detach().reshape(-1).cpu() for name, parameter in model.named_parameters()}
    held = flat | {name: buffer.detach().reshape(-1).cpu() for name, buffer in model.named_buffers()}
    checks = [float(zlib.crc32(values.contiguous().view(torch.uint8).numpy().data)) for values in held.values()]
    ranks = mesh.everyone.collect(checks)
    for rank, theirs in enumerate(ranks):
        for name, mine, other in zip(held, ranks[0], theirs, strict=True):
            if mine != other:
                raise ValuesError(
                    f"model: rank {rank} holds other values of {name!r} than rank 0; expected the same on every rank. "
                    "Seed every rank alike before building the model, or build it with fourfold.deferred"
                )

    def fill(name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return flat[name][start:stop].to(dtype)

    return fill
