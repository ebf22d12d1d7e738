"""What hangs on a placed model's modules and belongs to this one model: no copy of it could work."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from fourfold.placement.refusals import PlacementError


class Uncopied:
    """Copied or pickled with a module that it hangs on, it says what to do instead.

    `copy.deepcopy` would go on to the arenas, the other ranks' channels and their locks, and fail at one of these.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise PlacementError(
            "a placed model cannot be copied or pickled: its weights lie in arenas beside those of other ranks. "
            "Copy the plain model before parallelize, and load into the copy what it is to hold, on all ranks: "
            "copy.load_state_dict(run.model.state_dict()), or the master weights of run.logical_state()"
        )
