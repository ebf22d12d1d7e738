from __future__ import annotations

import torch

from fourfold.planner.tap import Message, span, tapped
from fourfold.wire import ops

SIZES = {"x": 2, "y": 6, "z": 3, "data": 5}


class Heard:
    deaf = False

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.order: list[str] = []

    def send(self, message: Message) -> int:
        self.messages.append(message)
        self.order.append(f"send {len(self.messages) - 1}")
        return len(self.messages) - 1

    def amend(self, number: int, message: Message) -> None:
        self.messages[number] = message

    def wait(self, number: int) -> None:
        self.order.append(f"wait {number}")


def test_groups_of_axes_products_and_parts():
    assert span("x", SIZES) == (2, 1)
    assert span("y", SIZES) == (6, 2)
    assert span("data", SIZES) == (5, 36)
    assert span("z+data", SIZES) == (15, 12)
    assert span("y/3", SIZES) == (3, 2)


def test_what_is_sent_of_uneven_sums_and_of_gathers():
    seven = Message("z", "gradient", "all_reduce", 7, 4)  # shares of 3, 2, 2: four leave, and three twice
    assert seven.sent(SIZES) == (4 + 2 * 3) * 4
    assert seven.whole(SIZES) == seven.received(SIZES) == 28
    gather = Message("data", "weight", "all_gather", 4 * 100, 1)
    assert (gather.sent(SIZES), gather.whole(SIZES), gather.received(SIZES)) == (400, 500, 0)


def test_messages_are_heard_in_order_and_when_they_are_waited_for():
    heard = Heard()
    mesh = tapped({"x": 2, "y": 3}, heard)
    first = mesh["x"].all_reduce(torch.ones(5), "activation")
    ops.gather_cut(torch.ones(2, 4), mesh["y"], "embedding")
    first.wait()
    first.wait()
    assert heard.order == ["send 0", "send 1", "wait 1", "wait 0"]
    assert heard.messages == [
        Message("x", "activation", "all_reduce", 5, 4),
        Message("y", "embedding", "all_gather", 2 * 8 * 4, 1),
    ]


def test_of_broadcasts_and_sums_to_one_rank_the_tensor_is_known_whoever_sends_it():
    from fourfold.wire.dry import dry_mesh

    sizes, heard = {"x": 2, "y": 3}, Heard()
    mesh = dry_mesh(sizes)
    for one in (tapped(sizes, heard), mesh):
        one["y"].broadcast(torch.ones(7), 1, "weight").wait()
        one["y"].reduce(torch.ones(5), 2, "gradient").wait()
        one["y"].reduce(torch.ones(5), 0, "gradient").wait()
    assert heard.messages == [
        Message("y", "weight", "broadcast", 7, 4),
        Message("y", "gradient", "reduce", 5, 4, 2),
        Message("y", "gradient", "reduce", 5, 4, 0),
    ]
    assert [one.whole(sizes) for one in heard.messages] == [28, 20, 20]
    assert [one.sent(sizes) for one in heard.messages] == [19, 20, 0]  # of 2 x 28 bytes in three shares the first
    assert [one.received(sizes) for one in heard.messages] == [0, 0, 60]
    assert sum(one.sent(sizes) for one in heard.messages) == mesh.ledger.sent()


def test_bytes_are_those_that_the_axis_counts():
    from fourfold.wire.dry import dry_mesh

    heard, mesh = Heard(), dry_mesh({"x": 2, "y": 3})
    for one in (tapped({"x": 2, "y": 3}, heard), mesh):
        one["y"].all_reduce(torch.ones(7), "activation").wait()
        one.over("x", "y").all_reduce(torch.ones(9), "activation").wait()
        one["y"].reduce_scatter(torch.ones(2), torch.ones(6), "gradient").wait()
    said = sum(message.sent({"x": 2, "y": 3}) for message in heard.messages)
    assert said == mesh.ledger.sent()
