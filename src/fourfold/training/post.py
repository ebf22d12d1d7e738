"""What moves carry: bundles forwards, gradients backwards, between the buffers of two ranks."""

from __future__ import annotations

from torch import Tensor

from fourfold.placement.pipe.bundle import Bundle
from fourfold.schedule import Action, Buffer
from fourfold.schedule.action import ACTIVATION, GRADIENT, GRADIENT_SUM
from fourfold.training.passes import Passes
from fourfold.wire.links import Links

Content = tuple[Tensor | None, ...]


def kind_of(buffer: Buffer) -> str:
    """What the bytes of a move are for, as the ledger has it."""
    return GRADIENT if buffer.kind == GRADIENT_SUM else buffer.kind


class Post:
    """Carries the moves of a program over the pipe axis, for `schedule.Ranks`."""

    def __init__(self, links: Links, passes: Passes) -> None:
        self._links, self._passes = links, passes

    def expect(self, source: int, count: int) -> None:
        """In the step that begins, so many moves will come from worker `source`."""
        self._links.expect(source, count)

    def send(self, number: int, move: Action) -> None:
        """Hand over what the move reads; nobody else on this rank wants it."""
        buffer = move.reads[0]
        content = self._passes.job.buffers.pop(buffer)
        if isinstance(content, Bundle):
            content = (content.described(), *(value.detach() for value in content.values))
        assert isinstance(content, tuple)
        self._links.send(move.worker, number, content, kind_of(buffer))

    def poll(self) -> tuple[int, int, Content] | None:
        """What has come, if something has."""
        return self._links.poll()

    def receive(self) -> tuple[int, int, Content]:
        """What comes next."""
        return self._links.receive()

    def put(self, move: Action, content: Content) -> None:
        """Make it the buffer that the move writes."""
        buffer = move.writes[0]
        if buffer.kind == ACTIVATION:
            description, *values = [tensor for tensor in content if tensor is not None]
            self._passes.job.buffers[buffer] = self._passes.bundle(buffer.stage, description, values)
        else:
            self._passes.job.buffers[buffer] = content
