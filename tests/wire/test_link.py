"""Messages between two ranks: any shapes, in the order sent, never in the caller's way, each byte counted."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold import wire
from fourfold.ledger import Flow, Ledger
from fourfold.wire import formulas
from fourfold.wire.link import HEADER
from fourfold.wire.watch import Watch, path_of, read
from ranks import Processes, ProcessFailed

Launch = Callable[..., list[Any]]


@pytest.fixture(params=["threads", "gloo"])
def launch(request: pytest.FixtureRequest) -> Launch:
    return wire.threads.launch if request.param == "threads" else request.getfixturevalue("gloo")


def pipe(world: wire.World) -> wire.Axis:
    return wire.Mesh(world, {"pipe": world.size})["pipe"]


def helpers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("messages")]


def content(seed: int) -> list[Tensor | None]:
    """Tensors of several dtypes and any shape: none, empty, of no dims, not contiguous, many, with a gradient."""
    draw = random.Random(seed)
    found: list[Tensor | None] = []
    for _ in range(draw.choice([0, 1, 2, 3, 12])):
        shape = [draw.choice([0, 1, 2, 5]) for _ in range(draw.randrange(4))]
        dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
        tensor = torch.randint(0, 2 if dtype == torch.bool else 99, shape, dtype=torch.int64).to(dtype)
        if tensor.dim() > 1 and draw.random() < 0.5:
            tensor = tensor.transpose(0, 1)
        if dtype.is_floating_point and draw.random() < 0.5:
            tensor.requires_grad_()
        found.append(None if draw.random() < 0.2 else tensor)
    return found


def forms(tensors: list[Tensor | None]) -> list[tuple[torch.Size, int] | None]:
    return [None if tensor is None else (tensor.shape, tensor.element_size()) for tensor in tensors]


def same(found: tuple[Tensor | None, ...], want: list[Tensor | None]) -> bool:
    return len(found) == len(want) and all(
        two is None if one is None else two is not None and one.dtype == two.dtype and torch.equal(one, two)
        for one, two in zip(found, want, strict=True)
    )


# ---- what comes is what was sent


def everyone_to_everyone(world: wire.World, count: int, delays: int | None) -> tuple[int, int, list[str]]:
    """(bytes metered, bytes by the formula, threads that are left)."""
    axis, draw = pipe(world), random.Random(delays)
    others = [rank for rank in range(axis.size) if rank != axis.index]
    sent = {(rank, key): content(100 * axis.index + 10 * rank + key) for key in range(count) for rank in others}
    want = 0
    with wire.Links(axis) as links:
        for rank in others:
            links.expect(rank, count)
        for (rank, key), tensors in sent.items():
            pause(draw, delays)
            kind = "activation" if key % 2 else "activation-gradient"
            links.send(rank, key, shadow(tensors, 100 * axis.index + 10 * rank + key), kind)
            want += formulas.message(forms(tensors))
        next_key = dict.fromkeys(others, 0)
        for _ in range(count * len(others)):
            pause(draw, delays)
            source, key, tensors = links.receive()
            assert key == next_key[source], "messages of one rank come in the order sent"
            next_key[source] += 1
            seed = 100 * source + 10 * axis.index + key
            assert same(tensors, shadow(content(seed), seed)), (source, key)
        assert links.poll() is None
    kinds = axis.ledger.sent(kind="activation") + axis.ledger.sent(kind="activation-gradient")
    assert kinds == axis.ledger.sent(), "nothing but the messages was counted"
    return axis.ledger.sent(), want, helpers() if world.backend == "gloo" else []


def shadow(tensors: list[Tensor | None], seed: int) -> list[Tensor | None]:
    """The same forms with numbers that both ends can make."""
    found: list[Tensor | None] = []
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            with torch.no_grad():
                tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape).add(seed + place).remainder(97))
        found.append(tensor)
    return found


def pause(draw: random.Random, delays: int | None) -> None:
    if delays is not None:
        time.sleep(draw.random() * 0.01)


@pytest.mark.parametrize("delays", [None, 1, 2], ids=["at once", "delays 1", "delays 2"])
@pytest.mark.parametrize("size", [2, 3])
def test_any_message_arrives_in_order_and_its_bytes_are_the_formula(launch: Launch, size: int, delays: int) -> None:
    for metered, want, left in launch(size, everyone_to_everyone, 9, delays):
        assert metered == want
        assert left == []
    assert helpers() == []


# ---- nobody is in anybody's way


def many_in_flight(world: wire.World, count: int) -> tuple[bool, bool]:
    axis = pipe(world)
    with wire.Links(axis) as links:
        if axis.index:
            axis.barrier()
            links.expect(0, count)
            assert [links.receive().key for _ in range(count)] == list(range(count))
            return True, True
        sendings = [links.send(1, key, [torch.full((key, 100), 1.0)], "activation") for key in range(count)]
        early = sendings[1].done
        axis.barrier()
        for sending in sendings:
            sending.wait()
        return early, all(sending.done for sending in sendings)


def test_sends_never_wait_for_a_receiver_that_has_not_come(launch: Launch) -> None:
    (early, late), _ = launch(2, many_in_flight, 60)
    assert late
    assert early == (launch is wire.threads.launch), "gloo keeps a message until it is wanted"


def big_both_ways(world: wire.World, count: int, numel: int) -> list[float]:
    axis = pipe(world)
    other = 1 - axis.index
    with wire.Links(axis) as links:
        links.expect(other, count)
        for key in range(count):
            links.send(other, key, [torch.full((numel,), float(key + 10 * axis.index))], "activation")
        tensors = [links.receive().tensors[0] for _ in range(count)]
    assert all(tensor is not None and bool((tensor == tensor[0]).all()) for tensor in tensors)
    return [tensor[0].item() for tensor in tensors if tensor is not None]


def test_messages_larger_than_any_socket_buffer_pass_both_ways_at_once(launch: Launch) -> None:
    assert launch(2, big_both_ways, 3, 4_000_000) == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]


def lets_go(world: wire.World) -> tuple[int, int]:
    """Tensors that are alive (after the first message has gone, after it has come) while the second is awaited."""
    axis, numel, alive = pipe(world), 12_345, []
    with wire.Links(axis) as links:
        if axis.index == 0:
            sending = links.send(1, 0, [torch.ones(numel)], "activation")
            sending.wait()
            alive = count_of(numel)
            axis.barrier()
            links.send(1, 1, [], "activation").wait()
        else:
            links.expect(0, 2)
            links.receive()
            alive = count_of(numel)
            axis.barrier()
            links.receive()
    return alive, len(helpers())


def count_of(numel: int) -> int:
    """Tensors of so many elements, once the threads have had their turn."""
    left = 1
    for _ in range(300):
        gc.collect()
        left = sum(type(one) is Tensor and one.numel() == numel for one in gc.get_objects())
        if not left:
            return 0
        time.sleep(0.01)
    return left


def test_tensors_are_let_go_as_soon_as_they_have_gone_or_were_taken(gloo: Processes) -> None:
    assert gloo(2, lets_go) == [(0, 0), (0, 0)]


def steps(world: wire.World, count: int) -> list[int]:
    """No receive of a step is open when it ends: collectives and other messages pass on the same axis between."""
    axis, found = pipe(world), []
    other = 1 - axis.index
    with wire.Links(axis) as links:
        for step in range(count):
            axis.ledger.begin(step)
            links.expect(other, step)
            for key in range(step):
                links.send(other, key, [torch.ones(key)], "activation")
            found.append(sum(links.receive().key for _ in range(step)))
            assert axis.collect([float(step)]) == [[step]] * 2
    return [*found, axis.ledger.sent(3, kind="activation")]


def test_links_serve_step_after_step(launch: Launch) -> None:
    bytes_of_three = 3 * 256 + 4 * (0 + 1 + 2)
    assert launch(2, steps, 5) == [[0, 0, 1, 3, 6, bytes_of_three]] * 2


# ---- what goes wrong has a name


def one_raises(world: wire.World) -> None:
    axis, other = pipe(world), 1 - world.rank
    try:
        with wire.Links(axis) as links:
            links.expect(other, 2)
            sending = links.send(other, 0, [torch.ones(100_000)], "activation")
            links.receive()
            sending.wait()
            axis.barrier()
            if world.rank == 1:
                raise ValueError("out of cheese")
            links.receive()
    finally:
        mine = [name for name in helpers() if world.backend == "gloo" or name.endswith(f"rank {other}")]
        assert not mine, mine


def test_a_rank_that_raises_is_named_by_who_waits_and_leaves_no_thread(gloo: Processes) -> None:
    with pytest.raises(ProcessFailed) as caught:
        gloo(2, one_raises)
    assert "out of cheese" in caught.value.reports[1]
    assert "rank 0, step 0: a message from rank 1 on axis pipe (ranks 0, 1) failed" in caught.value.reports[0]
    with pytest.raises(wire.RankFailed, match="rank 1 of 2 failed: ValueError: out of cheese"):
        wire.threads.launch(2, one_raises)
    assert helpers() == []


def one_raises_in_the_middle(world: wire.World) -> None:
    axis = pipe(world)
    with wire.Links(axis) as links:
        if world.rank == 0:
            links.expect(1, 3)
            for _ in range(3):
                links.receive()
        for key in range(2):
            links.send(0, key, [torch.ones(20_000_000)], "activation")
        raise ValueError("out of cheese")


def test_a_rank_that_raises_while_much_is_on_its_way_ends_all_the_same(gloo: Processes) -> None:
    with pytest.raises(ProcessFailed) as caught:
        gloo(2, one_raises_in_the_middle)
    assert "out of cheese" in caught.value.reports[1]


def one_is_killed(world: wire.World) -> None:
    axis, other = pipe(world), 1 - world.rank
    with wire.Links(axis) as links:
        links.expect(other, 2)
        links.send(other, 0, [torch.ones(10)], "activation").wait()
        links.receive()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        links.receive()


def test_a_rank_that_is_killed_is_named_by_who_waits(gloo: Processes) -> None:
    with pytest.raises(ProcessFailed) as caught:
        gloo(2, one_is_killed)
    assert caught.value.reports[1] == "died with exit code -9"
    assert "a message from rank 1 on axis pipe (ranks 0, 1) failed" in caught.value.reports[0]
    assert "onnection" in caught.value.reports[0]


def one_is_killed_before_it_receives(world: wire.World) -> None:
    axis = pipe(world)
    axis.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with wire.Links(axis) as links:
        links.send(1, 7, [torch.ones(10)], "activation").wait()


def test_a_message_that_cannot_go_is_named(gloo: Processes) -> None:
    with pytest.raises(ProcessFailed) as caught:
        gloo(2, one_is_killed_before_it_receives)
    assert "message 7 to rank 1 (send 2) on axis pipe (ranks 0, 1) failed" in caught.value.reports[0]


def one_never_sends(world: wire.World, folder: str) -> str:
    world.watch = Watch(folder, world.rank)
    axis = pipe(world)
    axis.ledger.begin(6)
    axis.barrier()
    if world.rank == 1:
        world.watch.step(6)
        time.sleep(4)
        return "slept"
    with pytest.raises(wire.WireError) as caught, wire.Links(axis) as links:
        links.expect(1, 1)
        links.receive()
    assert helpers() == []
    return str(caught.value)


def test_a_message_that_does_not_come_in_time_names_who_is_late(gloo: Processes, tmp_path: Path) -> None:
    said, _ = gloo(2, one_never_sends, str(tmp_path), timeout=30, patience=2)
    assert "rank 0, step 6: a message from rank 1 on axis pipe (ranks 0, 1) failed" in said
    assert "rank 1, step 6, is not waiting" in said


def test_a_rank_that_waits_for_a_message_shows_in_the_watch(tmp_path: Path) -> None:
    mine = path_of(tmp_path, 0)

    def body(world: wire.World) -> str:
        world.watch = Watch(tmp_path, world.rank)
        axis = pipe(world)
        axis.barrier()
        with wire.Links(axis) as links:
            if world.rank == 0:
                links.expect(1, 1)
                links.expect(2, 1)
                return f"{links.receive().source} {links.receive().source}"
            awaited = "message from rank 1, rank 2" if world.rank == 1 else "message from rank 2"
            while not ((seen := read(mine)).waiting and seen.op == awaited):
                time.sleep(0.001)
            links.send(0, 0, [torch.ones(1)], "activation").wait()
        return str(seen)

    order, first, second = wire.threads.launch(3, body)
    assert order == "1 2"
    assert "waits in message from rank 1, rank 2 on axis pipe (" in first
    assert "waits in message from rank 2 on axis pipe (" in second
    assert not read(mine).waiting


def garbage(world: wire.World) -> None:
    axis = pipe(world)
    if world.rank == 1:
        axis.send(torch.arange(32), 0, "activation", HEADER).wait()
        return
    with wire.Links(axis) as links:
        links.expect(1, 1)
        links.receive()


def test_garbage_is_an_error_that_names_both_ranks(launch: Launch) -> None:
    with pytest.raises((wire.RankFailed, ProcessFailed)) as caught:
        launch(2, garbage)
    text = str(caught.value)
    assert "rank 0, step 0: a message from rank 1 on axis pipe (ranks 0, 1) failed" in text
    assert "found words that are no message of this version: the first is 0x0" in text
    assert helpers() == []


def lone(world: wire.World) -> Iterator[tuple[str, Callable[[wire.Links], object]]]:
    yield (
        "no number for torch.uint16",
        lambda links: links.send(1 - world.rank, 3, [torch.zeros(1, dtype=torch.uint16)], "activation"),
    )
    yield "waiting for a message that nobody announced", lambda links: links.receive()
    yield "expected a number of messages, found -1", lambda links: links.expect(1 - world.rank, -1)
    yield "is this rank itself", lambda links: links.send(world.rank, 3, [], "activation")
    yield "expected `peer` to be a rank of the axis", lambda links: links.expect(2, 1)
    yield "kind of traffic", lambda links: links.send(1 - world.rank, 3, [], "activations")


def test_wrong_use_is_refused() -> None:
    def body(world: wire.World) -> Ledger:
        axis = pipe(world)
        for says, use in lone(world):
            with pytest.raises(wire.UsageError, match=says), wire.Links(axis) as links:
                use(links)
        return axis.ledger

    for ledger in wire.threads.launch(2, body):
        assert ledger.traffic() == {}


def closed_too_early(world: wire.World) -> None:
    with wire.Links(pipe(world)) as links:
        links.expect(1 - world.rank, 1)


def test_links_that_close_while_a_message_is_expected_say_so(launch: Launch) -> None:
    with pytest.raises((wire.RankFailed, ProcessFailed), match="closed while a message from rank [01] is expected"):
        launch(2, closed_too_early)
    assert helpers() == []


def test_nccl_is_refused() -> None:
    axis = wire.Dry("pipe", 2, 0)
    axis.world.backend = "nccl"
    with pytest.raises(wire.UsageError, match="launch with backend gloo"):
        wire.Links(axis)


def test_a_message_is_one_send_in_the_ledger() -> None:
    def body(world: wire.World) -> Ledger:
        axis, other = pipe(world), 1 - world.rank
        with wire.Links(axis) as links:
            links.expect(other, 1)
            links.send(other, 0, [torch.ones(3), torch.ones(2, dtype=torch.int64)], "activation-gradient")
            links.receive()
        return axis.ledger

    for ledger in wire.threads.launch(2, body):
        ((flow, traffic),) = ledger.traffic().items()
        assert flow == Flow("pipe", "activation-gradient", "send")
        assert (traffic.calls, traffic.bytes) == (1, 256 + 12 + 16)
