"""What the CPU allocator really handed out during a piece of work, by torch's profiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

from fourfold import torch_private

# Torch's profiler announces every start and stop on stderr, unless it is told otherwise before it starts first.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


class Peak(NamedTuple):
    """Bytes relative to what was allocated when the work began.

    Attributes:
        peak: most at any moment.
        end: still held afterwards.
    """

    peak: int
    end: int


def measured_peak(step: Callable[[], Any]) -> Peak:
    """Run `step` once and return the peak of the CPU allocator above its level at the start.

    The running sum of the profiler's allocator events. Not seen: other threads, numpy's and gloo's buffers, and the
    release of what was allocated before; so let the step run once before, and hand in a steady one.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        kept = step()
    levels = list(accumulate(torch_private.allocations(record), initial=0))
    del kept
    return Peak(max(levels), levels[-1])
