"""A pipeline's stages run dry, one after the other in one process: what some of them send inside."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fourfold.ledger import Flow, Ledger, Traffic
from fourfold.placement.pipe.bundle import Bundle, gradients
from fourfold.placement.pipe.line import Line


def sent(
    line: Line, whole: Callable[[], tuple[Tensor, object]], ledger: Ledger, stages: Collection[int]
) -> dict[Flow, Traffic]:
    """The traffic of these stages in forward and backward of one micro-batch.

    Args:
        line: of a model on axes where nothing moves.
        whole: runs the model and the loss.
        ledger: where these axes count.
        stages: whose traffic to tell.
    """
    found: dict[Flow, Traffic] = {}
    given: Bundle | None = None
    kept: list[tuple[Bundle | None, Bundle | Tensor]] = []
    for stage in range(line.stages):
        with _counted(found, ledger, stage in stages):
            made = line.run(stage, whole, given)
        kept.append((given, made if isinstance(made, Bundle) else made[0]))
        given = made.detached() if isinstance(made, Bundle) else None
    by: tuple[Tensor | None, ...] = ()
    for stage, (given, made) in reversed(list(enumerate(kept))):
        with _counted(found, ledger, stage in stages):
            _backward(made, by)
        by = () if given is None else gradients(given.values)
    return found


def _backward(made: Bundle | Tensor, by: tuple[Tensor | None, ...]) -> None:
    if isinstance(made, Tensor):
        made.backward()
    else:
        torch.autograd.backward(*made.ends(by))


@contextmanager
def _counted(found: dict[Flow, Traffic], ledger: Ledger, counts: bool) -> Iterator[None]:
    """What is sent in this context is added to `found`, if it counts."""
    before = {flow: (one.calls, one.bytes) for flow, one in ledger.traffic().items()}
    yield
    for flow, one in ledger.traffic().items() if counts else ():
        calls, nbytes = before.get(flow, (0, 0))
        if one.calls == calls:
            continue
        total = found.setdefault(flow, Traffic())
        total.calls, total.bytes = total.calls + one.calls - calls, total.bytes + one.bytes - nbytes
