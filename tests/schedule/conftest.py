"""Example orders that the tests lay out: one-forward-one-backward, and round robin over workers without a stage."""

from collections.abc import Callable, Iterator

import pytest

from fourfold.schedule import Action, Buffer, Shape


def _forward(stage: int, microbatch: int, worker: int = -1) -> Action:
    incoming = (Buffer("activation", stage - 1, microbatch),) if stage else ()
    outgoing = (Buffer("activation", stage, microbatch),)
    return Action("forward", stage, range(microbatch, microbatch + 1), worker, reads=incoming, writes=outgoing)


def _backward(stage: int, microbatch: int, last: int, worker: int = -1) -> Action:
    activation = Buffer("activation", stage, microbatch)
    incoming = () if stage == last else (Buffer("activation-gradient", stage + 1, microbatch),)
    outgoing = (Buffer("activation-gradient", stage, microbatch),) if stage else ()
    return Action(
        "backward", stage, range(microbatch, microbatch + 1), worker, reads=(activation, *incoming), writes=outgoing
    )


def _one_forward_one_backward(shape: Shape) -> Iterator[Action]:
    """Stage s warms up with min(p - s, m) forwards, then alternates: backward first."""
    for stage in range(shape.stages):
        warm = min(shape.stages - stage, shape.microbatches)
        done = 0
        for microbatch in range(shape.microbatches):
            while done < min(warm + microbatch, shape.microbatches):
                yield _forward(stage, done, worker=stage)
                done += 1
            yield _backward(stage, microbatch, shape.stages - 1, worker=stage)


def _round_robin(shape: Shape) -> Iterator[Action]:
    """All forwards, then all backwards, the worker left open."""
    for stage in range(shape.stages):
        for microbatch in range(shape.microbatches):
            yield _forward(stage, microbatch)
    for stage in reversed(range(shape.stages)):
        for microbatch in range(shape.microbatches):
            yield _backward(stage, microbatch, shape.stages - 1)


Layout = Callable[[Shape], Iterator[Action]]


@pytest.fixture
def one_forward_one_backward() -> Layout:
    return _one_forward_one_backward


@pytest.fixture
def round_robin() -> Layout:
    return _round_robin
