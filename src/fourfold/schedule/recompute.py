"""Any order with less kept and more computed: a forward keeps the input of its stage, and runs again before backward.

Chen et al. 2016, "Training deep nets with sublinear memory cost", section 4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from fourfold.schedule.action import (
    ACTIVATION_GRADIENT,
    BACKWARD,
    BACKWARD_INPUT,
    CHECKPOINT,
    RECOMPUTE,
    STASH,
    Action,
    Buffer,
)


def recomputed(actions: Iterable[Action], stages: Collection[int], *, early: bool = True) -> Iterator[Action]:
    """Yield an order's actions with a recompute before each backward of these stages.

    What moves to another tier and back on the way is then the checkpoint.

    Args:
        actions: of any order.
        stages: those whose forwards shall keep their input only.
        early: recompute while the gradient is awaited; else only once it is there, as a part of the backward, which
            holds what is recomputed for a shorter time.
    """
    for action in actions:
        if action.stage not in stages:
            yield action
        elif action.kind in (BACKWARD, BACKWARD_INPUT):
            yield _recompute(action, early)
            yield action
        else:
            yield action._replace(**{name: _kept(getattr(action, name)) for name in ("reads", "writes", "frees")})


def _recompute(backward: Action, early: bool) -> Action:
    """What the backward frees is what the recompute writes; it reads the same weights."""
    stash = tuple(buffer for buffer in backward.frees if buffer.kind == STASH)
    reads = tuple(one for one in backward.reads if not early or one.kind != ACTIVATION_GRADIENT)
    return backward._replace(kind=RECOMPUTE, reads=_kept(reads), writes=stash, frees=_kept(stash))


def _kept(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
    return tuple(one._replace(kind=CHECKPOINT) if one.kind == STASH else one for one in buffers)
