"""One self-contained HTML page about a run, and a trace beside it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fourfold.ledger import Difference
from fourfold.report import tables, trace
from fourfold.report.chart import Chart, Line, chart, short
from fourfold.report.recorded import Recorded, ReportError, read

PAGE, TRACE = "report.html", "trace.json.gz"


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        path: of the page.
        trace: of the trace; None where no spans were recorded.
        facts: the run in a few figures, by name.
        differences: forecast minus measurement.
    """

    path: Path
    trace: Path | None
    facts: dict[str, str]
    differences: tuple[Difference, ...]
    ok: bool = True

    def text(self) -> str:
        """A few lines for a terminal."""
        width = max(map(len, [*self.facts, "report"]))
        lines = [f"{name:<{width}}  {value}" for name, value in self.facts.items()]
        for row in self.differences:
            both = f"{amount(row.what, row.forecast)}, measured {amount(row.what, row.measured)}"
            lines.append(f"{'forecast':<{width}}  {row.what}: {both} ({off(row)})")
        lines.append(f"{'report':<{width}}  {self.path}")
        if self.trace is not None:
            lines.append(f"{'trace':<{width}}  {self.trace} (open it in ui.perfetto.dev)")
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "ok": self.ok,
            "report": str(self.path),
            "trace": str(self.trace) if self.trace else None,
            "facts": self.facts,
            "forecast": [row._asdict() for row in self.differences],
        }


def write(folder: str | Path) -> Report:
    """Write `report.html` and `trace.json.gz` into a run folder.

    Raises:
        ReportError: it is no run folder, or it cannot be written to.
    """
    run = read(Path(folder))
    differences = tuple(tables.comparison(run.ledgers, run.forecast, _typical(run, "seconds")))
    axes = run.plan.placement.axes() if run.plan else {}
    try:
        spans = trace.write(run.path / TRACE, run.ledgers, axes)
        if not spans:
            (run.path / TRACE).unlink()
        text = render(run, differences, has_trace=spans > 0)
        aside = run.path / f".{PAGE}.{os.getpid()}.partial"
        aside.write_text(text, encoding="utf-8")
        aside.replace(run.path / PAGE)
    except OSError as error:
        raise ReportError(f"{run.path}: cannot write the report ({error.strerror}); free some space") from error
    return Report(run.path / PAGE, run.path / TRACE if spans else None, facts(run), differences)


def render(run: Recorded, differences: tuple[Difference, ...], *, has_trace: bool) -> str:
    """The page."""
    environment = Environment(
        loader=PackageLoader("fourfold.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"amount": amount, "off": off}
    environment.filters |= {"nbytes": nbytes, "duration": duration, "short": short}
    return environment.get_template("report.html.j2").render(
        run=run,
        name=run.path.resolve().name,
        plan=str(run.plan) if run.plan else run.last("start").get("plan", "unknown"),
        inexact=run.plan.inexact if run.plan else None,
        unbounded=run.last("start").get("inexact", ()),
        facts=facts(run),
        state=state(run),
        loss=losses(run),
        speed=speed(run),
        splits=[one for rank in sorted(run.ledgers) if (one := tables.split(run.ledgers[rank]))],
        hiding=tables.hiding(run.ledgers),
        kernels=(run.now("kernels") or [{}])[-1].get("choices", ()),
        matrix=tables.matrix(run.ledgers, run.forecast),
        memory=tables.memory(run.ledgers, run.forecast),
        process_memory=[record["memory"] for record in run.now("step") if "memory" in record],
        differences=differences,
        interval=interval(run),
        sample=run.last("sample").get("text") or run.last("end").get("sample"),
        trace=TRACE if has_trace else None,
    )


def state(run: Recorded) -> str:
    """How the run ended: "finished", "stopped", or "not finished"."""
    end = run.last("end")
    return "not finished" if not end else "stopped" if end.get("stopped") else "finished"


def facts(run: Recorded) -> dict[str, str]:
    """The figures on top of the page."""
    steps, start = run.of("step"), run.last("start")
    found = {"state": state(run), "plan": str(run.plan) if run.plan else start.get("plan", "unknown")}
    if "ranks" in start:
        found["ranks"] = str(start["ranks"])
    if "parameters" in start:
        found["parameters"] = short(start["parameters"])
    if steps:
        found["steps"] = str(steps[-1]["step"])
        found["loss"] = f"{steps[-1]['loss']:.4f}"
        rate, used = _typical(run, "tokens_per_second"), _typical(run, "mfu")
        found |= {"tokens/s": f"{rate:,.0f}"} if rate is not None else {}
        found |= {"MFU": f"{used:.1%}"} if used is not None else {}
        found["time in steps"] = duration(sum(record.get("seconds", 0.0) for record in steps))
    if run.of("evaluation"):
        found["validation loss"] = f"{run.last('evaluation')['loss']:.4f}"
    return found


def _typical(run: Recorded, measure: str) -> float | None:
    """The median over the journalled steps of the last plan; None where none says it."""
    values = [record[measure] for record in run.now("step") if record.get(measure) is not None]
    return median(values) if values else None


@dataclass(frozen=True)
class Interval:
    """Seconds of a step: the forecast between its ends, and the median of what was measured."""

    low: float
    likely: float
    high: float
    measured: float

    @property
    def inside(self) -> bool:
        """The measured time lies in the forecast's interval."""
        return self.low <= self.measured <= self.high


def interval(run: Recorded) -> Interval | None:
    """The time forecast beside the run; None where one of them is missing."""
    notes, measured = run.forecast.notes if run.forecast else {}, _typical(run, "seconds")
    low, high = notes.get("step seconds at best"), notes.get("step seconds at worst")
    if measured is None or low is None or high is None:
        return None
    return Interval(low, notes["step seconds"], high, measured)


def losses(run: Recorded) -> Chart | None:
    """Training and validation loss over steps."""
    lines = [
        Line("training loss", "first", [(record["step"], record["loss"]) for record in run.of("step")]),
        Line("validation loss", "second", [(record["step"], record["loss"]) for record in run.of("evaluation")]),
    ]
    return chart("Training and validation loss", [line for line in lines if line.points], "step", digits=5)


def speed(run: Recorded) -> Chart | None:
    """Tokens per second over steps."""
    points = [
        (record["step"], record["tokens_per_second"]) for record in run.now("step") if "tokens_per_second" in record
    ]
    return chart("Tokens per second", [Line("tokens/s", "first", points)], "step", from_zero=True) if points else None


def amount(what: str, value: float) -> str:
    """A value of a comparison, in the unit that its name asks for."""
    if what.startswith("memory"):
        return nbytes(value)
    return (
        f"{value:,.0f}" if what.startswith("bytes") else duration(value) if what.endswith("seconds") else short(value)
    )


def off(row: Difference) -> str:
    """How far a forecast is off, and which way, in words: a sign alone does not say whether -10% is fast or slow."""
    if row.forecast == row.measured:
        return "exact"
    if row.error is None:
        return "nothing measured"
    share = f"{abs(row.error):.1%}"
    return "less than 0.1% off" if share == "0.0%" else f"{share} too {'high' if row.error > 0 else 'low'}"


def nbytes(value: float | None) -> str:
    """Bytes in the unit that suits them; a dash for None."""
    if value is None:
        return "–"
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(value) >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes} min {rest} s"
