"""The verdict on a plan: how far it is from serial, and whether that is as near as it promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from fourfold.plan import Plan
from fourfold.verify.case import Evidence, Moved, StepEvidence
from fourfold.verify.measure import Distance

EPSILON = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-5}
"""How far an exact plan may be from serial, by the precision that it is verified in."""
ROUNDINGS = 8
"""An exact plan may be this many times further from serial than serial is from itself with its sums reordered."""
LARGEST = 1e-3
"""Where plain PyTorch itself is further off than this, nothing is decided."""
BF16 = 2.0**-8
"""Relative error of one rounding to bf16."""


@dataclass(frozen=True)
class Verdict:
    """What was found.

    Attributes:
        plan: as it was run (its precision may be wider than planned).
        steps: one row a step.
        moved: bytes predicted and measured: those of rank 0 in its first step, and whatever was not as predicted.
        agree: every rank holds the same weights, bit for bit.
        ranks: how many there were.
        backend: what carried the messages.
        inexact: why the model's random numbers cannot be those of one process, one line each.
        drifted: buffers that ranks hold different values of.
        narrow: the first module that computes in a narrower type than the plan's; "" if there is none.
    """

    plan: Plan
    steps: tuple[StepEvidence, ...]
    moved: tuple[Moved, ...]
    agree: bool
    ranks: int
    backend: str
    inexact: tuple[str, ...]
    drifted: tuple[str, ...] = ()
    narrow: str = ""

    @classmethod
    def of(cls, plan: Plan, evidence: Sequence[Evidence], backend: str) -> Verdict:
        """Put together what the ranks saw, in rank order."""
        moved = tuple(row for one in evidence for row in one.moved)
        agree = len({one.digest for one in evidence}) == 1
        names = sorted({name for one in evidence for name in one.buffers})
        drifted = tuple(name for name in names if len({one.buffers.get(name) for one in evidence}) > 1)
        return cls(
            plan,
            evidence[0].steps,
            moved,
            agree,
            len(evidence),
            backend,
            evidence[0].inexact,
            drifted,
            evidence[0].narrow,
        )

    @property
    def exact(self) -> bool:
        """The plan promises serial's numbers up to the rounding of sums in another order."""
        return plan_bound(self.plan) == 0.0

    @property
    def rounding(self) -> float:
        """The largest difference of plain PyTorch from itself, rows cut as the plan cuts them."""
        return max((step.rounding.error for step in self.steps), default=0.0)

    @property
    def allowed(self) -> float:
        """Of an exact plan: the largest difference by the measure. Of another: the bound of its gradient's error."""
        if not self.exact:
            return plan_bound(self.plan) + EPSILON[self.plan.placement.precision]
        epsilon = EPSILON["fp32" if self._rounding_modules else self.plan.placement.precision]
        return max(epsilon, min(ROUNDINGS * self.rounding, LARGEST))

    @property
    def _rounding_modules(self) -> tuple[str, ...]:
        """What rounds sums over cut features to float32 (an RMS norm of Llama): the first such module, if there is one.

        The reference with its rows cut does not show this: a row's own sums are taken in one order there.
        """
        return (self.narrow,) if self.narrow and self.plan.placement.grid.cuts_features else ()

    @property
    def worst(self) -> Distance:
        """What is held against `allowed`."""
        if not self.exact:  # later steps start from other weights: only the first is bounded
            return self.steps[0].addends
        found = [one for step in self.steps for one in (step.loss_error, step.gradient, step.weight, step.buffer)]
        return max(found, key=lambda distance: distance.error)

    @property
    def bytes_equal(self) -> bool:
        """Every rank moved what was predicted, in every step."""
        return all(row.equal for row in self.moved)

    @property
    def decided(self) -> bool:
        """Plain PyTorch agrees with itself well enough to be a reference. (A bound needs no such agreement.)"""
        return not self.exact or self.rounding <= LARGEST

    @property
    def near(self) -> bool:
        """The numbers are as near to serial as the plan promises."""
        return self.decided and self.worst.error <= self.allowed

    @property
    def ok(self) -> bool:
        """Near enough, replicas agree, and bytes are as predicted."""
        return self.near and self.agree and not self.drifted and self.bytes_equal

    def text(self) -> str:
        """A screen for a person."""
        return "\n".join([*self._head(), "", *self._table(), "", *self._bytes(), "", *self._conclusion()]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """For `--json` and the report."""
        return {
            "ok": self.ok,
            "plan": str(self.plan),
            "exact": self.exact and not self.inexact,
            "inexact": [*self.plan.inexact, *self.inexact],
            "precision": self.plan.placement.precision,
            "ranks": self.ranks,
            "backend": self.backend,
            "allowed": self.allowed,
            "worst": {"error": self.worst.error, "layer": self.worst.layer},
            "rounding": self.rounding,
            "near": self.near,
            "agree": self.agree,
            "drifted": list(self.drifted),
            "bytes_equal": self.bytes_equal,
            "verdict": self._conclusion()[-1],
            "steps": [
                {
                    "step": step.step,
                    "loss": step.loss,
                    "serial_loss": step.serial_loss,
                    "loss_error": step.loss_error.error,
                    "gradient_error": step.gradient.error,
                    "gradient_layer": step.gradient.layer,
                    "weight_error": step.weight.error,
                    "weight_layer": step.weight.layer,
                    "buffer_error": step.buffer.error,
                    "buffer_layer": step.buffer.layer,
                }
                for step in self.steps
            ],
            "bytes": [
                {
                    "rank": row.rank,
                    "step": row.step,
                    **row.flow._asdict(),
                    "calls": row.measured.calls,
                    "predicted": row.predicted.bytes,
                    "measured": row.measured.bytes,
                    "equal": row.equal,
                }
                for row in self.moved
            ],
        }

    def _head(self) -> list[str]:
        bounded = "; ".join(self.plan.inexact) or "computes in bf16: a gradient is rounded where it is made"
        kind = "exact: equals serial up to the order of sums" if self.exact else bounded
        kind += ", but for the random numbers of the model below" if self.inexact else ""
        return [
            f"plan       {self.plan}",
            f"promise    {kind}",
            *(f"not exact  {line}" for line in self.inexact),
            *(f"rounds     {one} computes in float32 whatever it is given" for one in self._rounding_modules),
            f"run        {_counted(len(self.steps), 'step')} on {_counted(self.ranks, 'rank')} ({self.backend}), "
            f"beside one plain process, in {self.plan.placement.precision}",
        ]

    def _table(self) -> list[str]:
        buffers = any(step.buffer.layer for step in self.steps)
        heads = ("step", "loss", "serial", "loss error", "worst gradient", "worst weight")
        rows = [heads + ("worst buffer",) * buffers]
        rows += [
            (
                str(step.step),
                f"{step.loss:.6f}",
                f"{step.serial_loss:.6f}",
                f"{step.loss_error.error:.1e}",
                str(step.gradient),
                str(step.weight),
                *((str(step.buffer),) if buffers else ()),
            )
            for step in self.steps
        ]
        return _aligned(rows)

    def _bytes(self) -> list[str]:
        if not self.moved:
            return ["bytes      none moved, none predicted"]
        rows = [("rank", "step", "axis", "kind", "op", "calls", "predicted", "measured", "")]
        for row in self.moved:
            axis, kind, op = row.flow
            predicted, measured = f"{row.predicted.bytes:,}", f"{row.measured.bytes:,}"
            remark = "" if row.equal else "DIFFERS"
            calls = str(row.measured.calls)
            rows.append((str(row.rank), str(row.step), axis, kind, op, calls, predicted, measured, remark))
        return _aligned(rows)

    def _likely(self) -> str:
        if self.exact and self.worst.layer.startswith("buffer "):
            return "a buffer that is made of a whole batch must be made of all ranks' rows, once a step"
        return "if the model mixes rows, that is why"

    def _conclusion(self) -> list[str]:
        lines = []
        seen = "see what is not exact above" if self.inexact else ""
        if not self.agree:
            lines.append("ranks hold different weights: replicas have drifted apart")
        if self.drifted:
            lines.append(
                f"NOT EQUAL: ranks hold different values of the buffer{'s'[: len(self.drifted) > 1]} "
                f"{', '.join(self.drifted)}: each notes the rows that it computes; "
                "gather what the buffer is made of over the ranks (as batch norm is), or keep it out of the model"
            )
        if not self.bytes_equal:
            lines.append("bytes moved are not the bytes predicted")
        if not self.decided:
            lines.append(
                f"not decided: plain PyTorch itself differs by {self.rounding:.1e} when the rows are cut; "
                + (seen or "does the model mix rows by other means than batch norm, or is its loss ill-conditioned?")
            )
        elif not self.near:
            what = "an exact plan differs" if self.exact else "beyond its bound"
            lines.append(
                f"NOT EQUAL TO SERIAL: {what}: {self.worst}, allowed {self.allowed:.1e}; " + (seen or self._likely())
            )
        elif self.exact:
            lines.append(f"equal to serial: worst difference {self.worst}, allowed {self.allowed:.1e}")
        else:
            lines.append(
                f"within its bound: the first gradient is off by {self.worst}, relative to its addends; "
                f"allowed {self.allowed:.1e}"
            )
        return lines


def plan_bound(plan: Plan) -> float:
    """||error of the gradient|| / ||its addends||, as the plan states it; 0 for an exact plan.

    An addend is rounded when it is sent and the sum once more. A codec of contraction d is off by at most sqrt(1 - d).
    Clipping divides by a norm that is off by as much, which doubles the bound.
    """
    bound = 2 * BF16 if plan.placement.precision == "bf16" else 0.0
    if plan.wire.gradient is not None:
        codec = plan.wire.gradient.module.Codec(plan.wire.gradient.options)
        bound += 0.0 if codec.exact else 2 * sqrt(max(0.0, 1 - codec.contraction))
    return 2 * bound


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
