"""Stock models that look at values: what they must be told when there are none.

transformers reads the positions to see whether a row holds several packed sequences. Where they have no values it
cannot: on meta it fails; on fake tensors it takes a general mask to be safe, and so computes another step than the one
that will run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from torch import Tensor


class _Thread(threading.local):
    entered = 0


_thread = _Thread()


class OneSequenceARow:
    """While a thread is inside, models of transformers that number the positions themselves take every row for one
    sequence, as they find it to be when they run. May be entered again."""

    def __enter__(self) -> None:
        masks = sys.modules.get("transformers.masking_utils")
        found = getattr(masks, "find_packed_sequence_indices", None)
        if masks is not None and found is not None and not isinstance(found, _Packed):
            masks.find_packed_sequence_indices = _Packed(found)  # type: ignore[attr-defined]
        _thread.entered += 1

    def __exit__(self, *_: object) -> None:
        _thread.entered -= 1


class _Packed:
    """Stands for the function that looks for packed sequences, for good: it is that function for whoever is outside."""

    def __init__(self, inner: Callable[[Tensor], Tensor | None]) -> None:
        self.inner = inner

    def __call__(self, position_ids: Tensor) -> Tensor | None:
        valueless = position_ids.is_meta or type(position_ids) is not Tensor
        # A model numbers the positions once for all rows; a batch that says them says them for every row.
        made = len(position_ids) == 1 or position_ids.stride(0) == 0
        return None if _thread.entered and valueless and made else self.inner(position_ids)
