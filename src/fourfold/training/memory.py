"""What a run's tensors really take, by category: what rests is known to the byte, what comes and goes is measured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from fourfold.ledger.ledger import MEMORY
from fourfold.planner import measured_peak
from fourfold.training.run import Run

PARAMETERS, GRADIENTS, OPTIMIZER = MEMORY[:3]
PEAK = "memory peak"
"""The note under which the most bytes at one moment of a step are kept, as the planner keeps its forecast of it."""

Result = TypeVar("Result")


def in_use(device: torch.device) -> int:
    """Bytes in use: the process's resident set on a CPU, the allocator's peak on a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import psutil

    return psutil.Process().memory_info().rss


def at_rest(run: Run) -> dict[str, int]:
    """Bytes that stay from step to step, by category: weights (shards and what rests beside them), gradients, state."""
    arenas = [unit.arena for unit in run.placed.units]
    weights = [tensor for arena in arenas for tensor in (arena.shard, arena.rest, arena.full) if tensor is not None]
    states = [tensor for state in run.optimizer.state_dict() for tensor in state.values()]
    return {
        PARAMETERS: _bytes(weights),
        GRADIENTS: _bytes(arena.gradient for arena in arenas),
        OPTIMIZER: _bytes(states),
    }


def measurable(run: Run) -> bool:
    """Whether a step's memory can be told from that of others: thread ranks share one allocator and one profiler."""
    return run.world.backend != "threads"


def measure(run: Run, step: Callable[[], Result]) -> Result:
    """Take one steady step and keep its memory in the run's ledger.

    The categories that rest, and as the note "memory peak" the most bytes at one moment: on a CPU by the profiler's
    allocator events of this thread (numpy's and the backend's own buffers are not seen), on a GPU by the allocator.
    Nothing is under way when the profiler starts and stops: a gather that ended just then has broken the heap.
    """
    results: list[Result] = []
    resting = at_rest(run)
    device = run.world.device
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        results.append(step())
        peak = torch.cuda.max_memory_allocated(device)
    else:

        def settled() -> None:
            results.append(step())
            run.placed.settle()

        run.placed.settle()
        buffers = _bytes(run.model.buffers())
        peak = sum(resting.values()) + buffers + measured_peak(settled).peak
    for category, nbytes in resting.items():
        run.ledger.peak(category, nbytes)
    run.ledger.notes[PEAK] = float(peak)
    return results[0]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages below, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())
