"""The queries of a panel in full: what it shows, and one that reports an engine that lost a metric behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import Field

from prefixwatch.dashboards.definition import Dashboard, Panel
from prefixwatch.dashboards.queries.expressions import finished, metrics_of, recording_rules
from prefixwatch.documents import load
from prefixwatch.documents.section import Section
from prefixwatch.slo.buckets import BOUNDS

SIGNALS = Path(__file__).parents[1] / "engine_signals.yaml"
MISSING = "missing"
"""The reference of the query that reports lost metrics."""
EXPLAINING = frozenset({"timeseries"})
"""Kinds of panels that can show it: in a table the lost value is a dash."""


class _Signals(Section):
    signals: dict[str, list[str]] = Field(description="signal: the series that are made of it")


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One query as Grafana has it, variables still in it."""

    ref: str
    expr: str
    legend: str

    @property
    def explains(self) -> bool:
        """Whether it only has series while an engine lacks a metric."""
        return self.ref == MISSING


def queries_of(panel: Panel, dashboard: Dashboard) -> list[PanelQuery]:
    """All of a panel's queries. Raises DocumentError."""
    place = f"{dashboard.title}: {panel.title}"
    found = [
        PanelQuery(chr(ord("A") + number), finished(query.expr, dashboard.variables, place), query.legend)
        for number, query in enumerate(panel.queries)
    ]
    signals = missing_signals(panel)
    if signals and panel.kind in EXPLAINING:
        names = "|".join(signals)
        expr = f'topk(10, max by (target, signal) (prefixwatch_missing_signal{{signal=~"{names}"}})) * NaN'
        legend = "{{target}} lost {{signal}}: see Exporter health"
        found.append(PanelQuery(MISSING, finished(expr, dashboard.variables, place), legend))
    return found


def missing_signals(panel: Panel) -> list[str]:
    """Signals of engines without which a series of this panel has no value."""
    read = set(metrics_read(panel))
    return [signal for signal, series in engine_signals().items() if read & set(series)]


def metrics_read(panel: Panel) -> list[str]:
    """Names of the series that a panel shows."""
    names = [name for query in panel.queries for name in metrics_of(finished(query.expr, [], panel.title))]
    return list(dict.fromkeys(names))


def top_bound(panel: Panel) -> float | None:
    """The highest bucket bound of the histogram whose quantiles a panel shows.

    A quantile of this very value lies beyond the buckets, nobody knows how far (EM22). None where there is none.
    """
    rules = {rule.name: rule.expr for rule in recording_rules()}
    families = set()
    for query in panel.queries:
        expr = finished(query.expr, [], panel.title)
        for text in (expr, *(rules[name] for name in metrics_of(expr) if name in rules)):
            if "histogram_quantile" in text:
                families |= {name.removesuffix("_bucket") for name in metrics_of(text) if name.endswith("_bucket")}
    tops = {max(BOUNDS[family]) for family in families if family in BOUNDS}
    return tops.pop() if len(tops) == 1 and panel.kind != "heatmap" else None


def description(panel: Panel, thresholds: Sequence[str]) -> str:
    """What is shown, by which thresholds it is judged, and from which metrics."""
    lines = [panel.about, *(f"Line: {text}." for text in thresholds)]
    metrics = ", ".join(f"`{name}`" for name in metrics_read(panel))
    return "\n\n".join([*lines, f"No data: {panel.empty}.", f"Metric: {metrics}"])


@cache
def engine_signals() -> dict[str, list[str]]:
    """The series that have no value, or another one, without a signal; by signal."""
    return load(SIGNALS, _Signals).signals
