"""A claim: what a paper says, what is predicted, what is measured, and a control that must fail it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Figures = Mapping[str, float]


@dataclass(frozen=True)
class Claim:
    """The claim of a system.

    Attributes:
        system: its name.
        paper: authors, year, identifier.
        statement: what is claimed, in words.
        predicted: the figures that must come out, by name.
        measure: runs the mechanism.
        control: runs the same with the mechanism off; it must not bring the predicted figures.
        off: what the control is, in words.
        tolerance: largest |measured - predicted| / |predicted|; an absolute bound where zero is predicted.
        beside: figures of the paper that no run here can measure, each with what our model says of it. They are shown
            side by side and judged by the reader, not by `misses`.
    """

    system: str
    paper: str
    statement: str
    predicted: Figures
    measure: Callable[[], Figures]
    control: Callable[[], Figures]
    off: str
    tolerance: float = 0.0
    beside: Callable[[], Mapping[str, tuple[float, float]]] = dict

    def misses(self, found: Figures) -> tuple[str, ...]:
        """The figures that are missing or further off than the tolerance."""
        return tuple(name for name, value in self.predicted.items() if not self._near(found.get(name), value))

    def _near(self, found: float | None, predicted: float) -> bool:
        return found is not None and abs(found - predicted) <= self.tolerance * (abs(predicted) or 1.0)


@dataclass(frozen=True)
class Reproduced:
    """One claim, run.

    Attributes:
        measured, control: what came out.
        missed, control_missed: which figures did not hold.
        beside: (published, modelled) of the figures that are shown beside.
    """

    name: str
    claim: Claim
    measured: Figures
    control: Figures
    missed: tuple[str, ...]
    control_missed: tuple[str, ...]
    beside: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """The mechanism brings every figure, and the control does not."""
        return not self.missed and bool(self.control_missed)

    @property
    def verdict(self) -> str:
        """One line."""
        if self.missed:
            return f"does NOT hold: {', '.join(self.missed)}"
        if not self.control_missed:
            return "decides nothing: it holds with the mechanism off, too"
        return "holds; the control fails, as it must"

    def text(self) -> str:
        """A table with its verdict."""
        claim = self.claim
        lines = [f"{self.name}: {claim.system} ({claim.paper})", f"  {claim.statement}", f"  control: {claim.off}"]
        width = max(map(len, claim.predicted))
        lines.append(f"  {'':<{width}}  {'predicted':>15}  {'measured':>15}  {'control':>15}")
        for name, predicted in claim.predicted.items():
            found = (predicted, self.measured.get(name), self.control.get(name))
            cells = "  ".join(f"{'-' if value is None else format(value, ',.10g'):>15}" for value in found)
            lines.append(f"  {name:<{width}}  {cells}")
        lines.append(f"  tolerance {claim.tolerance:g}; {self.verdict}")
        if self.beside:
            width = max(map(len, self.beside))
            lines.append(f"  {'not judged:':<{width}}  {'published':>15}  {'our model':>15}")
            for name, (published, modelled) in self.beside.items():
                lines.append(f"  {name:<{width}}  {published:>15,.10g}  {modelled:>15,.3g}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        claim = self.claim
        return {
            "ok": self.ok,
            "recipe": self.name,
            "system": claim.system,
            "paper": claim.paper,
            "claim": claim.statement,
            "predicted": dict(claim.predicted),
            "measured": dict(self.measured),
            "tolerance": claim.tolerance,
            "control": {"what": claim.off, "figures": dict(self.control), "fails": list(self.control_missed)},
            "beside": {
                name: {"published": published, "model": modelled} for name, (published, modelled) in self.beside.items()
            },
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Result:
    """Every claim that was run."""

    reproduced: tuple[Reproduced, ...]

    @property
    def ok(self) -> bool:
        """All of them hold."""
        return all(one.ok for one in self.reproduced)

    def text(self) -> str:
        """One table after the other."""
        held = sum(one.ok for one in self.reproduced)
        return "\n\n".join([*(one.text() for one in self.reproduced), f"{held} of {len(self.reproduced)} hold"]) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return {"ok": self.ok, "recipes": [one.to_dict() for one in self.reproduced]}


def judge(name: str, claim: Claim) -> Reproduced:
    """Run a claim and its control."""
    measured, control = claim.measure(), claim.control()
    missed, control_missed = claim.misses(measured), claim.misses(control)
    return Reproduced(name, claim, measured, control, missed, control_missed, claim.beside())
