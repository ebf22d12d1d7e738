"""Works: waiting twice, rounds that start while the caller computes, and many at once."""

from __future__ import annotations

import pytest
import torch

from fourfold import wire
from fourfold.wire.work import Work


class Slow:
    """A transfer that is done when told."""

    def __init__(self) -> None:
        self.ready, self.waited = False, 0

    def done(self) -> bool:
        return self.ready

    def wait(self) -> None:
        self.ready, self.waited = True, self.waited + 1


def test_rounds_run_one_after_another_and_only_when_the_last_is_done() -> None:
    first, second, log = Slow(), Slow(), []

    def steps():
        log.append("issued")
        yield first
        log.append("second round")
        yield second
        log.append("results")

    work = Work("all_reduce", "gradient", 0, 1, steps(), None)
    assert log == ["issued"]
    assert not work.advance()
    assert log == ["issued"]
    first.ready = True
    assert not work.advance()
    assert log == ["issued", "second round"]
    work.wait()
    assert log == ["issued", "second round", "results"]
    assert work.done and work.advance()
    work.wait()
    assert (first.waited, second.waited) == (1, 1)


@pytest.mark.parametrize("rounds", [1, 2])
def test_proceed_waits_for_the_first_of_two_rounds_only(rounds: int) -> None:
    transfers = [Slow() for _ in range(rounds)]

    def steps():
        yield from transfers

    work = Work("all_reduce", "gradient", 0, 1, steps(), None, rounds)
    for _ in range(3):
        work.proceed()
        assert [one.waited for one in transfers] == [1, 0][-rounds:]
    assert not work.done and (work.exposed > 0) == (rounds == 2)
    work.wait()
    assert [one.waited for one in transfers] == [1] * rounds
    work.proceed()
    assert work.done


@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_thread_ranks_have_two_rounds(size: int) -> None:
    def body(world: wire.World) -> list[float]:
        axis = wire.Mesh(world, {"data": size})["data"]
        tensors = [torch.full((4,), float(axis.index + n)) for n in range(2)]
        works = [axis.all_reduce(tensor, "gradient") for tensor in tensors]
        for work in works:
            work.proceed()
            assert not work.done
        for work in works:
            work.wait()
        gathered = torch.empty(size)
        single = axis.all_gather(gathered, torch.ones(1), "weight")
        single.proceed()
        assert axis.under_way == 1, "one round: nothing to begin"
        single.wait()
        return [tensor[0].item() for tensor in tensors]

    total = float(sum(range(size)))
    assert wire.threads.launch(size, body) == [[total, total + size]] * size


def test_an_error_is_raised_once_and_ends_the_work() -> None:
    def steps():
        yield Slow()
        raise RuntimeError("connection reset by peer")

    work = Work("all_reduce", "gradient", 0, 1, steps(), None)
    with pytest.raises(RuntimeError, match="connection reset"):
        work.wait()
    assert work.done


def test_advance_lets_the_second_round_run_before_anyone_waits() -> None:
    def body(world: wire.World) -> tuple[bool, list[float]]:
        mesh = wire.Mesh(world, {"data": 3})
        axis, tensor = mesh["data"], torch.full((5,), float(world.rank))
        work = axis.all_reduce(tensor, "gradient")
        axis.barrier()  # every rank has posted its parts
        mesh.advance()
        axis.barrier()  # every rank has posted its sums
        mesh.advance()
        return work.done, tensor.tolist()

    assert wire.threads.launch(3, body) == [(True, [3.0] * 5)] * 3


def test_ranks_may_advance_at_different_moments() -> None:
    def body(world: wire.World) -> list[float]:
        axis = wire.Mesh(world, {"data": 3})["data"]
        tensors = [torch.full((4,), float(world.rank + number)) for number in range(6)]
        works = []
        for number, tensor in enumerate(tensors):
            works.append(axis.all_reduce(tensor, "gradient"))
            if number % 3 == world.rank:
                axis.advance()
        for work in works:
            work.wait()
        return [tensor[0].item() for tensor in tensors]

    assert wire.threads.launch(3, body) == [[3.0 + 3 * number for number in range(6)]] * 3
