"""The policies side by side: how soon, how much reused, how evenly; one chart of two panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from typing import NamedTuple

from prefixwatch.loadgen.grading.model import PolicyGrade
from prefixwatch.loadgen.grading.wording import number, percent
from prefixwatch.loadgen.report.charts import COLOURS, LOG_AXIS, MARKERS, Chart, Trace, limit_line

_OVERLOADED = 1.5
_MARGIN = 0.18
"""Room around the marks, as a share of the span between the outermost ones."""
_CHARACTER, _LINE, _GAP = 0.016, 0.075, 0.025
"""Size of a label's text and its distance from the mark, as shares of a panel."""


class _Mark(NamedTuple):
    place: int
    name: str
    x: float
    ttft_ms: float


class _Box(NamedTuple):
    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: _Box) -> float:
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(0.0, width) * max(0.0, height)


_PANEL = _Box(0.0, 0.0, 1.0, 1.0)


def leaderboard_chart(policies: Mapping[str, PolicyGrade]) -> Chart:
    """TTFT p95 against hit tokens and against the fleet's imbalance; no traces where there is nothing to compare."""
    figures = [
        (place, name, own.value("ttft_p95"), own.value("hit_ratio"), own.value("hotspot_max_over_mean"))
        for place, (name, own) in enumerate(policies.items())
    ]
    reuse = [
        _Mark(place, name, 100 * hits, ttft) for place, name, ttft, hits, _ in figures if ttft and hits is not None
    ]
    balance = [_Mark(place, name, skew, ttft) for place, name, ttft, _, skew in figures if ttft and skew]
    times = [log10(mark.ttft_ms) for mark in (*reuse, *balance)]
    heights = _padded(times, 0.5, _MARGIN)
    hits_range = _padded([mark.x for mark in reuse], 10.0, _MARGIN, 0.0, 100.0)
    skew_range = _padded([mark.x for mark in balance] + [1.0, _OVERLOADED], 0.5, _MARGIN)
    time_axis = {"title": {"text": "TTFT p95, ms (logarithmic)"}, **LOG_AXIS, "range": heights}
    return Chart(
        id="tradeoff",
        title="First token, reuse and balance",
        description="One mark per policy, lower is sooner. Left: further right, more of the prompts was reused. Right: "
        "further left, the prompt tokens were spread more evenly; beyond the grey line at 1.5 a worker counts as "
        "overloaded.",
        traces=_panel(reuse, hits_range, heights, "") + _panel(balance, skew_range, heights, "2")
        if len(policies) > 1
        else [],
        layout={
            "xaxis": {"title": {"text": "hit tokens, % of prompt tokens"}, "domain": [0, 0.48], "range": hits_range},
            "yaxis": time_axis,
            "xaxis2": {"title": {"text": "busiest / mean"}, "domain": [0.52, 1], "anchor": "y2", "range": skew_range},
            "yaxis2": {**LOG_AXIS, "range": heights, "anchor": "x2", "showticklabels": False},
            "shapes": [{**limit_line("x", _OVERLOADED), "xref": "x2"}],
            "showlegend": False,
        },
        header=["policy", "TTFT p95 ms", "hit tokens", "busiest / mean"],
        rows=[[name, number(ttft), percent(hits), number(skew)] for _, name, ttft, hits, skew in figures],
    )


def _panel(marks: Sequence[_Mark], x_range: list[float], y_range: list[float], axis: str) -> list[Trace]:
    """One panel's marks, one trace each; `axis` is the suffix of its axes."""
    at = [(_share(mark.x, x_range), _share(log10(mark.ttft_ms), y_range)) for mark in marks]
    labels = label_positions([mark.name for mark in marks], at)
    return [
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": mark.name,
            "x": [round(mark.x, 3)],
            "y": [float(f"{mark.ttft_ms:.6g}")],
            "text": [mark.name],
            "textposition": label,
            "xaxis": f"x{axis}",
            "yaxis": f"y{axis}",
            "cliponaxis": False,
            "marker": {
                "symbol": MARKERS[mark.place % len(MARKERS)],
                "color": COLOURS[mark.place % len(COLOURS)],
                "size": 13,
            },
        }
        for mark, label in zip(marks, labels, strict=True)
    ]


def _padded(
    values: Sequence[float], least_span: float, margin: float, lowest: float | None = None, highest: float | None = None
) -> list[float]:
    """An axis range around the values; a bound of the scale is passed only by as much as a mark takes."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    middle, span = (low + high) / 2, max(high - low, least_span)
    low, high = middle - span * (0.5 + margin), middle + span * (0.5 + margin)
    return [
        low if lowest is None else max(low, lowest - 0.05 * span),
        high if highest is None else min(high, highest + 0.05 * span),
    ]


def _share(value: float, axis_range: Sequence[float]) -> float:
    return (value - axis_range[0]) / (axis_range[1] - axis_range[0])


def label_positions(names: Sequence[str], at: Sequence[tuple[float, float]]) -> list[str]:
    """For each mark the side on which its name covers least of other marks, names and the panel's edge."""
    taken = [_Box(x - _GAP / 2, y - _GAP, x + _GAP / 2, y + _GAP) for x, y in at]
    chosen = []
    for name, (x, y) in zip(names, at, strict=True):
        boxes = _label_boxes(len(name) * _CHARACTER, x, y)

        def covered(side: str, boxes: Mapping[str, _Box] = boxes) -> float:
            box = boxes[side]
            outside = (box.right - box.left) * (box.top - box.bottom) - box.overlap(_PANEL)
            return outside + sum(box.overlap(other) for other in taken)

        best = min(boxes, key=covered)
        taken.append(boxes[best])
        chosen.append(best)
    return chosen


def _label_boxes(width: float, x: float, y: float) -> dict[str, _Box]:
    """Plotly's text positions, in order of preference."""
    half, above, below = width / 2, y + _GAP, y - _GAP
    return {
        "top center": _Box(x - half, above, x + half, above + _LINE),
        "bottom center": _Box(x - half, below - _LINE, x + half, below),
        "middle right": _Box(x + _GAP, y - _LINE / 2, x + _GAP + width, y + _LINE / 2),
        "middle left": _Box(x - _GAP - width, y - _LINE / 2, x - _GAP, y + _LINE / 2),
        "top right": _Box(x, above, x + width, above + _LINE),
        "top left": _Box(x - width, above, x, above + _LINE),
        "bottom right": _Box(x, below - _LINE, x + width, below),
        "bottom left": _Box(x - width, below - _LINE, x, below),
    }
