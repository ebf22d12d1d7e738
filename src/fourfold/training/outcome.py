"""What a training run came to, for a person and for a program."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fourfold.training.failure import Failure


@dataclass(frozen=True)
class TrainOutcome:
    """The end of a run.

    Attributes:
        folder: of the run.
        plan: that was run, in words.
        steps: optimizer steps done; None where the run failed.
        stopped: a signal asked for it, before the last step.
        validation: mean loss on the held-out text.
        sample: text that the model wrote.
        failures: the cause of every failed group; restarts went on after all but the last of a failed run.
        failed: the run did not end well.
    """

    folder: Path
    plan: str
    steps: int | None = None
    stopped: bool = False
    validation: float | None = None
    sample: str | None = None
    failures: tuple[Failure, ...] = field(default_factory=tuple)
    failed: bool = False

    @property
    def ok(self) -> bool:
        """The run reached its end, or stopped cleanly because somebody asked."""
        return not self.failed

    @property
    def taken(self) -> str:
        """The steps done, in words."""
        return f"{self.steps} step{'' if self.steps == 1 else 's'}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"folder": str(self.folder), "failures": [asdict(one) for one in self.failures]}

    def text(self, again: str = "") -> str:
        """A few lines.

        Args:
            again: the command that goes on with a run that has not reached its last step; empty: said in words.
        """
        again = again or f"the same command with run.name={self.folder.name} --resume"
        lines = []
        if self.failed:
            reason = str(self.failures[-1]) if self.failures else "the group of workers ended without a reason"
            saved = any(self.folder.glob("checkpoints/step-*"))
            lines += [f"failed: {reason}"]
            lines += [f"to go on from what was saved: {again}"] if saved else ["nothing was saved before that"]
        elif self.stopped:
            lines += [f"stopped after {self.taken} and saved; to go on: {again}"]
        else:
            lines += [f"trained {self.taken} ({self.plan})"]
            lines += [f"validation loss {self.validation:.4f}"] if self.validation is not None else []
        earlier = self.failures[:-1] if self.failed else self.failures
        lines += [f"started again after: {one}" for one in earlier]
        return "\n".join([*lines, f"run folder {self.folder}"])
