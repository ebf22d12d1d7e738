"""Which rows of a step's global batch belong to which micro-batch and rank: the only place that knows."""

from __future__ import annotations


def split(rows: range, parts: int, part: int) -> range:
    """The `part`-th of `parts` contiguous pieces of `rows`, as even as possible (the first pieces get one more)."""
    size, extra = divmod(len(rows), parts)
    start = part * size + min(part, extra)
    return rows[start : start + size + (part < extra)]


def share(rows: int, microbatches: int, parts: int, microbatch: int, part: int) -> range:
    """The logical rows that rank `part` of `parts` computes in one micro-batch.

    Args:
        rows: rows of the global batch of one optimizer step.
        microbatches: micro-batches in that step.
        parts: ranks that the batch is cut over (z x data).
        microbatch: index of the micro-batch.
        part: index of the rank.

    Returns:
        A range of logical row numbers; empty where there are fewer rows than ranks.
    """
    return split(split(range(rows), microbatches, microbatch), parts, part)
