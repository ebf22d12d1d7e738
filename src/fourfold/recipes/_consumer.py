"""Five models as timed on one consumer GPU, and how eight of these share each: the numbers that RoundPipe compares by.

RoundPipe (2026, arXiv 2604.27085), artifact: milliseconds of one layer and one micro-batch of 4 x 2048 tokens. A
backward does not include the recompute, which takes as long as a forward; every layer is recomputed, the head is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fourfold.schedule.action import BACKWARD, FORWARD, MOVE, RECOMPUTE, Action

DEVICES, MICROBATCHES = 8, 16


class Timed(NamedTuple):
    """A model and its times.

    Attributes:
        layers: all alike; the head, which is none of them, goes with the last stage.
        forward, backward: milliseconds of a layer.
        head_forward, head_backward: of the head with the loss.
        hop: of a boundary tensor from one GPU to another.
        wide: layers of each stage, one stage a GPU.
        narrow: layers of each stage of the looped orders, several a GPU. Some stages are empty.
    """

    layers: int
    forward: float
    backward: float
    head_forward: float
    head_backward: float
    hop: float
    wide: tuple[int, ...]
    narrow: tuple[int, ...]

    def cost(self, cut: tuple[int, ...]) -> Callable[[Action], float]:
        """Milliseconds of an action, of stages of so many layers; what is not computed or moved takes none."""
        layer = {FORWARD: self.forward, RECOMPUTE: self.forward, BACKWARD: self.backward}
        head = {FORWARD: self.head_forward, BACKWARD: self.head_backward}
        last = len(cut) - 1

        def milliseconds(action: Action) -> float:
            if action.kind == MOVE:
                return self.hop
            own = head.get(action.kind, 0.0) if action.stage == last else 0.0
            return cut[action.stage] * layer.get(action.kind, 0.0) + own

        return milliseconds


MODELS = {
    "1.7B": Timed(28, 7.429, 15.831, 22.0655, 43.707, 1.6, (3, 3, 4, 4, 4, 4, 4, 2), (*(1,) * 18, *(2,) * 5, 0)),
    "8B": Timed(32, 18.50370313, 41.20659375, 37.2255, 74.501, 3.2, (4,) * 8, (1,) * 32),
    "20B": Timed(24, 21.6445625, 81.780875, 44.2925, 86.264, 2.25, (3,) * 8, (1,) * 24),
    "32B": Timed(64, 40.5610625, 91.17429688, 54.928, 108.294, 4.0, (8,) * 8, (1,) * 64),
    "235B": Timed(94, 43.016, 58.376, 42.444, 43.294, 3.2, (11, *(12,) * 6, 11), (0, *(1,) * 94, 0)),
}
"""Qwen3-1.7B, Llama 8B, GPT-OSS 20B, a 32B and a 235B model, the last with LoRA."""
