"""Stock models that look at values: what they must be told when there are none.

transformers reads the positions to see whether a row holds several packed sequences. On fake tensors it cannot, takes
a general mask to be safe, and so computes another step than the one that will run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """While entered, models of transformers take every row for one sequence, as they find it to be when they run."""
    masks = sys.modules.get("transformers.masking_utils")
    found = getattr(masks, "find_packed_sequence_indices", None)
    if masks is None or found is None:
        yield
        return
    masks.find_packed_sequence_indices = lambda *_, **__: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = found  # type: ignore[attr-defined]
