"""The list scheduler: who goes first, what waits, what does not depend on how it was asked."""

from random import Random

import pytest

from fourfold.schedule import ScheduleError, Shape, bind, validate
from fourfold.schedule.greedy import greedy
from fourfold.schedule.work import B, F, I, Piece, W, Work, in_turn, inputs

TWO = {(kind, stage, k): stage for kind in (F, B) for stage in (0, 1) for k in range(3)}
"""Two stages, each on its own worker, three micro-batches."""


def backward_first(piece: Piece) -> tuple[int, ...]:
    return piece[0] != B, piece[2]


def text(line: list[Piece]) -> str:
    return " ".join(f"{kind[0].upper()}{microbatch}" for kind, _, microbatch in line)


def test_whoever_is_idle_takes_the_best_that_is_ready():
    assert [text(line) for line in greedy(TWO, backward_first, {})] == ["F0 F1 F2 B0 B1 B2", "F0 B0 F1 B1 F2 B2"]


def test_what_is_held_back_waits():
    holds = {(F, 0, k): [(B, 0, k - 1)] for k in (1, 2)}
    assert [text(line) for line in greedy(TWO, backward_first, holds)] == ["F0 B0 F1 B1 F2 B2"] * 2


@pytest.mark.parametrize("seed", range(5))
def test_the_sequence_of_the_question_changes_nothing(seed):
    shuffled = list(TWO.items())
    Random(seed).shuffle(shuffled)
    level = lambda piece: (0,)  # noqa: E731
    assert greedy(dict(shuffled), level, {}) == greedy(TWO, level, {})


def test_a_circle_is_left_out_and_missed():
    lines = greedy(TWO, backward_first, {(F, 0, 1): [(B, 1, 1)]})
    assert (F, 0, 1) not in lines[0]
    work = Work(Shape(2, 3, 2))
    actions = [work.piece(*piece, worker) for worker, line in enumerate(lines) for piece in line]
    with pytest.raises(ScheduleError, match="forward of stage 0, micro-batch 1: expected exactly once, found 0 times"):
        validate(bind(actions, 2), Shape(2, 3, 2))


@pytest.mark.parametrize("halves", [False, True])
def test_inputs_are_what_the_actions_read(halves):
    work = Work(Shape(3, 1, 3))
    kinds = (F, I, W) if halves else (F, B)
    actions = {(kind, stage, 0): work.piece(kind, stage, 0, stage) for kind in kinds for stage in range(3)}
    writer = {buffer: piece for piece, action in actions.items() for buffer in action.writes}
    for piece, action in actions.items():
        assert set(inputs(piece, 2)) == {writer[buffer] for buffer in action.reads if buffer.kind != "weight"}


def test_passes_take_their_microbatches_in_turn():
    passes = [(F, 0), (F, 0), (I, 0), (F, 0), (B, 0), (W, 0), (I, 0), (W, 0)]
    assert list(in_turn(passes)) == [
        *((F, 0, 0), (F, 0, 1), (I, 0, 0), (F, 0, 2), (B, 0, 1)),
        *((W, 0, 0), (I, 0, 2), (W, 0, 2)),
    ]
