"""Prometheus' answers → data frames, as Grafana's Prometheus data source lays them out.

A frame is plain data: `{"refId", "fields": [{"name", "type", "values", "labels"?, "config"?}]}`. A field's values are
numbers (NaN included), texts, or milliseconds since 1970.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prefixwatch.alerts.prometheus import Series

Format = Literal["time_series", "table", "heatmap"]
Frame = dict[str, Any]

_PLACEHOLDER = re.compile(r"\{\{\s*([^}]+?)\s*\}\}")


@dataclass(frozen=True, slots=True)
class Query:
    """One query as it is sent, and how its answer is laid out."""

    ref_id: str
    expr: str
    instant: bool = False
    form: Format = "time_series"
    legend: str = ""
    step_seconds: float = 15.0
    """The distance of a range's points; a longer one is a gap."""
    alone: bool = True
    """Whether its panel has no other query; columns of several are told apart by `Value #A`."""


def frames(query: Query, series: Sequence[Series]) -> list[Frame]:
    """By the query's format; a heatmap's are those of its series."""
    return table_frame(query, series) if query.form == "table" else time_series_frames(query, series)


def time_series_frames(query: Query, series: Sequence[Series]) -> list[Frame]:
    """A frame a series. A step without a sample is a gap: the time field's interval says where one is missing."""
    return [
        {
            "refId": query.ref_id,
            "fields": [
                {
                    "name": "Time",
                    "type": "time",
                    "config": {"interval": round(query.step_seconds * 1000)},
                    "values": [_milliseconds(at) for at, _ in one.points],
                },
                {
                    "name": "Value",
                    "type": "number",
                    "labels": _labels(one),
                    "config": {"displayNameFromDS": series_name(one.labels, query.legend, query.expr)},
                    "values": [value for _, value in one.points],
                },
            ],
        }
        for one in series
    ]


def table_frame(query: Query, series: Sequence[Series]) -> list[Frame]:
    """One frame: the time, a text column a label in alphabetical order, and the value."""
    if not series:
        return []
    rows = [(one.labels, at, value) for one in series for at, value in one.points]
    columns: list[dict[str, Any]] = [
        {"name": "Time", "type": "time", "values": [_milliseconds(at) for _, at, _ in rows]},
        *(
            {"name": label, "type": "string", "values": [labels.get(label, "") for labels, _, _ in rows]}
            for label in sorted({label for one in series for label in one.labels})
        ),
        {
            "name": "Value" if query.alone else f"Value #{query.ref_id}",
            "type": "number",
            "values": [value for _, _, value in rows],
        },
    ]
    return [{"refId": query.ref_id, "fields": columns}]


def series_name(labels: Mapping[str, str], legend: str, expr: str) -> str:
    """`{{label}}` of a legend replaced; without a legend, the series in PromQL, or the query if it has no labels."""
    if legend:
        return _PLACEHOLDER.sub(lambda found: labels.get(found[1], ""), legend)
    text = ", ".join(f'{name}="{value}"' for name, value in sorted(labels.items()) if name != "__name__")
    return labels.get("__name__", "") + (f"{{{text}}}" if text else "") or expr


def _labels(one: Series) -> dict[str, str]:
    return {name: value for name, value in one.labels.items() if name != "__name__"}


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
