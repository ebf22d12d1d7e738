"""Scalars for TensorBoard, where it is installed or asked for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fourfold.training.journal import Record

SCALARS = ("loss", "lr", "gradient_norm", "tokens_per_second", "mfu", "memory")


class TensorboardError(ValueError):
    """TensorBoard files were asked for, and the package is not there."""


class Tensorboard:
    """A screen that writes event files."""

    def __init__(self, folder: Path, resumed: int = 0) -> None:
        """Write under `folder`; scalars that an earlier attempt wrote after step `resumed` are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resumed + 1 if resumed else None)

    def show(self, record: Record) -> None:
        """Write the scalars of a step or of an evaluation."""
        if record["kind"] == "step":
            for name in SCALARS:
                if record.get(name) is not None:
                    self._writer.add_scalar(f"train/{name}", record[name], record["step"])
        elif record["kind"] == "evaluation":
            self._writer.add_scalar("validation/loss", record["loss"], record["step"])

    def close(self) -> None:
        """Flush."""
        self._writer.close()


def wanted(setting: bool | str) -> bool:
    """Whether to write: `auto` means if the package is installed.

    Raises:
        TensorboardError: asked for, but not installed.
    """
    installed = importlib.util.find_spec("tensorboard") is not None
    if setting is True and not installed:
        raise TensorboardError(
            "run.tensorboard: expected the tensorboard package, found none; "
            "install fourfold[tensorboard], or set run.tensorboard=auto"
        )
    return installed if setting == "auto" else bool(setting)
