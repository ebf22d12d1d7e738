"""What cannot be placed with the results of one process is refused by name, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fourfold.anatomy import BATCH_NORMS, Anatomy

INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
"""The lazy ones become one of these."""


NEAREST = "; nearest: "
"""Begins what a refusal recommends of one axis and one linear alone. Who knows of the whole model says it better."""


class PlacementError(ValueError):
    """A model that cannot be placed: names the module or parameter, and what to try."""


def refuse(model: nn.Module, anatomy: Anatomy, *, ranks: int) -> None:
    """Refuse weights that an arena cannot hold, and randomness and statistics that nobody could repeat or share.

    Args:
        model: the plain model.
        anatomy: of the model.
        ranks: how many compute rows of one batch.

    Raises:
        PlacementError: a weight that is not a real floating-point tensor; a dropout or a batch norm inside a
            checkpoint of the model's own; sparse gradients; on several ranks, statistics over the rows of a batch that
            are taken elsewhere than in torch's batch norms, and settings of torch's modules by which a weight, a
            gradient or a buffer depends on which rows a rank computes.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise PlacementError(
                f"{name}: expected a real floating-point parameter, found {parameter.dtype}; "
                "make an integer a buffer, and keep the real and imaginary parts of a complex weight in two parameters"
            )
    for path, module in model.named_modules():
        if (odd := _odd_setting(module, ranks)) is not None:
            raise PlacementError(f"{path or type(model).__name__} is a {type(module).__name__} with {odd}")
    if ranks > 1:
        _refuse_statistics(model, anatomy, ranks)
    if anatomy.repeated:
        _refuse_own_checkpoints(model, anatomy)


def _refuse_own_checkpoints(model: nn.Module, anatomy: Anatomy) -> None:
    """Backward would run them again outside of the scopes that masks and statistics are drawn in: wrong gradients."""
    first, *others = (path or type(model).__name__ for path in anatomy.repeated)
    raise PlacementError(
        f"the model checkpoints itself (torch.utils.checkpoint) in {first}"
        f"{f' and {len(others)} more' if others else ''}, where it drops out or takes statistics of the batch; run "
        "again in backward, these would not be what they were. Turn that off (model.gradient_checkpointing_disable() "
        "in transformers) and set plan.placement.recompute: full, which does the same"
    )


def _odd_setting(module: nn.Module, ranks: int) -> str | None:
    """A setting of one of torch's modules by which ranks with other rows, or arenas, do not do what it says."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        trained = module.weight.requires_grad
        if module.sparse and trained:
            return "sparse=True: its gradient is no dense tensor, as an arena holds it; set sparse=False"
        if module.max_norm is not None and ranks > 1:
            return (
                f"max_norm={module.max_norm}: a rank would rescale the rows that it looks up, and the others not; set "
                "max_norm=None, and bound what was looked up in the forward instead"
            )
        if module.scale_grad_by_freq and trained and ranks > 1:
            return (
                "scale_grad_by_freq=True: a rank would count how often a row is looked up in its own part of the "
                "batch; set scale_grad_by_freq=False"
            )
    if isinstance(module, INSTANCE_NORMS) and module.track_running_stats and module.training and ranks > 1:
        return (
            "track_running_stats=True: its running statistics would be those of one rank's rows; set "
            "track_running_stats=False, or freeze it with .eval()"
        )
    return None


def _refuse_statistics(model: nn.Module, anatomy: Anatomy, ranks: int) -> None:
    """What a batch norm module asks of `F.batch_norm` is taken over all ranks; nothing else can be."""
    callers = {norm.module for norm in anatomy.batch_norms}
    for path, module in model.named_modules():
        if not isinstance(module, BATCH_NORMS):
            odd, what = path in callers, "calls F.batch_norm itself, outside of a batch norm module"
        else:
            odd, what = path not in callers, f"is a {type(module).__name__} that does not call F.batch_norm"
            odd = odd and type(module).forward not in (nn.BatchNorm2d.forward, nn.SyncBatchNorm.forward)
        if odd and module.training:
            raise PlacementError(
                f"{path or type(model).__name__} {what}: its statistics are those of one rank's rows, so {ranks} ranks "
                "do not compute what one process does; use torch's batch norm modules, whose statistics are taken over "
                "all ranks, or freeze it with .eval()"
            )


@contextmanager
def reads_explained(shard: str) -> Iterator[None]:
    """Torch's words for what cannot be while weights come and go, in ours."""
    try:
        yield
    except RuntimeError as error:
        words = str(error)
        if "currently running autograd.grad()" in words:
            raise PlacementError(
                f"the model or its loss calls torch.autograd.grad, and under plan.placement.shard: {shard} a block's "
                "weights leave when a whole backward leaves the block, which a gradient of its own inside the forward "
                "is not; shard: gradients keeps weights whole, and takes such a loss"
            ) from error
        if "saved tensor hooks" in words:
            raise PlacementError(
                f"a block calls torch.func.grad or its like, which torch does not allow where what backward needs is "
                f"watched, as under plan.placement.shard: {shard}; shard: gradients keeps weights whole, and watches "
                "nothing"
            ) from error
        if "storage of size 0" not in words and "data is not allocated" not in words:
            raise
        raise PlacementError(
            f"a block's weight was read while it was freed (plan.placement.shard: {shard} gathers a block's weights "
            "only for its own forward and backward), by a tensor that shares its memory. Does the model keep one "
            "(weight.detach(), a view) from step to step, or use a block's weight outside of it in some steps only? "
            "shard: gradients keeps weights whole"
        ) from error
