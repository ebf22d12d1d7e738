"""What cannot be placed with the results of one process is refused by name, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class PlacementError(ValueError):
    """A model that cannot be placed: names the module or parameter, and what to try."""


def refuse(model: nn.Module, *, ranks: int) -> None:
    """Refuse weights that an arena cannot hold, and statistics that do not add up.

    Args:
        model: the plain model.
        ranks: how many compute rows of one batch.

    Raises:
        PlacementError: a weight that is not a real floating-point tensor; batch norm in training on several ranks.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise PlacementError(
                f"{name}: expected a real floating-point parameter, found {parameter.dtype}; "
                "make an integer a buffer, and keep the real and imaginary parts of a complex weight in two parameters"
            )
    for name, module in model.named_modules():
        if ranks > 1 and isinstance(module, BATCH_NORMS) and module.training:
            raise PlacementError(
                f"{name}: batch norm takes its statistics over the rows of one rank, so {ranks} ranks do not compute "
                "what one process does; use GroupNorm or LayerNorm, or freeze it with .eval()"
            )


@contextmanager
def reads_explained(shard: str) -> Iterator[None]:
    """Torch's words for a weight that was read while it was freed, in ours."""
    try:
        yield
    except RuntimeError as error:
        words = str(error)
        if "storage of size 0" not in words and "data is not allocated" not in words:
            raise
        raise PlacementError(
            f"a block's weight was read while it was freed (plan.placement.shard: {shard} gathers a block's weights "
            "only for its own forward and backward). Does the model use a block's weight outside of it, keep a tensor "
            "of its inside beside its result, or change a result in place? shard: gradients keeps weights whole"
        ) from error
