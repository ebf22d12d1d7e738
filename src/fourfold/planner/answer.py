"""What the rooms above ask of the planner."""

from __future__ import annotations

from collections.abc import Callable

from fourfold.hardware import Cluster
from fourfold.plan import Plan
from fourfold.planner.explain import Outlook
from fourfold.planner.forecast import forecast
from fourfold.planner.search import look, silent
from fourfold.planner.subject import Subject
from fourfold.planner.traces import Traces


def plan(
    subject: Subject | Traces,
    cluster: Cluster,
    given: Plan | None = None,
    *,
    world: int | None = None,
    tell: Callable[[str], None] = silent,
) -> Outlook:
    """Forecast one plan, or all plans for `world` ranks (the whole cluster unless said), ranked.

    Args:
        subject: what is trained; hand in `Traces` to share the traces between many answers.
        tell: is told which plan of how many is being forecast.

    Raises:
        TraceError, ForecastError: the model, or the plan, cannot be forecast at all.
    """
    traces = subject if isinstance(subject, Traces) else Traces(subject)
    if given is not None:
        return Outlook(traces.subject, cluster, (forecast(traces, cluster, given),), _notes(traces, cluster))
    found = look(traces, cluster, world=world, tell=tell)
    notes = (*_notes(traces, cluster), *found.left_out)
    return Outlook(traces.subject, cluster, found.forecasts, notes, found.estimated)


def _notes(traces: Traces, cluster: Cluster) -> tuple[str, ...]:
    notes = [f"not exact: {line}" for line in traces.anatomy.inexact]
    if cluster.device.recalled:
        named = ", ".join(cluster.device.recalled)
        notes.append(f"{cluster.device.name}: not checked against a source: {named}")
    if traces.failures:
        notes.append("the model was traced the long way: " + "; ".join(traces.failures))
    if not cluster.is_cpu:
        notes.append("kernel workspace is not measured for this device: an allowance stands in the category 'other'")
    return tuple(notes)
