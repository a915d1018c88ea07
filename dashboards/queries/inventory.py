"""Every query that a Grafana would send for the shipped dashboards, read from their JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from prefixwatch.dashboards.build import RUNBOOKS
from prefixwatch.dashboards.definition import shipped
from prefixwatch.dashboards.grafana.classic import classic, targets
from prefixwatch.dashboards.queries.expressions import EVERYTHING, rate_interval_seconds, substituted
from prefixwatch.dashboards.queries.panel_queries import MISSING

_LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")


ANNOTATION = "annotation"
VARIABLE = "variable"


@dataclass(frozen=True, slots=True)
class Asked:
    """One query, variables still in it."""

    dashboard: str
    panel: str
    """The panel's title, `VARIABLE` or `ANNOTATION`."""
    ref: str
    """A for the first query; a variable's or annotation's name."""
    expr: str
    kind: Literal["range", "instant", "label values"]
    label: str = ""
    """The label whose values are asked for."""
    legend: str = ""

    @property
    def explains(self) -> bool:
        """Whether it has an answer only while an engine lacks a metric."""
        return self.ref == MISSING

    def __str__(self) -> str:
        return f"{self.dashboard} › {self.panel} › {self.ref}"


@dataclass(frozen=True, slots=True)
class Shown:
    """A dashboard's time range and scrape interval; the other variables are at All."""

    range_seconds: float = 900.0
    scrape_seconds: float = 15.0
    chosen: Mapping[str, str] | None = None
    """Variables with a value of their own."""

    @property
    def step_seconds(self) -> float:
        """For about 100 points."""
        return max(self.range_seconds / 100, self.scrape_seconds)

    def expanded(self, expr: str) -> str:
        """The expression with variables and intervals put in."""
        rate = rate_interval_seconds(self.step_seconds, self.scrape_seconds)
        filters = dict.fromkeys(("cluster", "job", "model", "worker", "tenant"), EVERYTHING) | dict(self.chosen or {})
        times = {"__rate_interval": _duration(rate), "__range": _duration(self.range_seconds)}
        return substituted(expr, {**filters, **times})


@cache
def everything_asked() -> tuple[Asked, ...]:
    """Of panels, variables and annotations. Raises DocumentError."""
    models = {name: classic(dashboard, RUNBOOKS) for name, dashboard in shipped().items()}
    return tuple(asked for name, model in models.items() for asked in asked_by(name, model))


def asked_by(name: str, model: dict[str, Any]) -> Iterator[Asked]:
    """The queries of one classic dashboard."""
    for variable in model["templating"]["list"]:
        found = variable["type"] == "query" and _LABEL_VALUES.fullmatch(variable["query"]["query"])
        if found:
            yield Asked(name, VARIABLE, variable["name"], found["selector"], "label values", found["label"])
    for annotation in model["annotations"]["list"]:
        yield Asked(name, ANNOTATION, annotation["name"], annotation["expr"], "range")
    for panel, target in targets(model["panels"]):
        kind: Literal["range", "instant"] = "instant" if target.get("instant") else "range"
        yield Asked(name, panel["title"], target["refId"], target["expr"], kind, "", target["legendFormat"])


def _duration(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"
