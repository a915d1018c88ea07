"""How much every figure of one run differs from another's, with its uncertainty, in one chart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prefixwatch.loadgen.grading.figures import DEFINITIONS
from prefixwatch.loadgen.grading.wording import signed_percent
from prefixwatch.loadgen.report.charts import COLOURS, Chart, Trace, limit_line

_LOOKS = {
    "better": (COLOURS[0], "triangle-up"),
    "worse": (COLOURS[1], "x"),
    "not significant": (COLOURS[7], "circle-open"),
}
"""Colour and marker of each effect: the colour alone never carries the meaning."""


class RunDifference(Protocol):
    """A figure of run A and of run B; `difference` is B − A."""

    @property
    def metric(self) -> str: ...
    @property
    def a_value(self) -> float | None: ...
    @property
    def difference(self) -> float | None: ...
    @property
    def relative(self) -> float | None: ...
    @property
    def ci95(self) -> tuple[float, float] | None: ...
    @property
    def effect(self) -> str: ...


def comparison_chart(found: Sequence[RunDifference], titles: Sequence[str]) -> Chart:
    """Relative differences with their 95 % intervals; `titles` are the figures' names, one for each comparison.

    What is the same in both, and what was 0 in the baseline and so has no relative difference, is left to the table.
    """
    shown = [
        (title, one)
        for title, one in zip(titles, found, strict=True)
        if one.relative is not None and one.ci95 is not None and any(one.ci95) and one.a_value
    ]
    return Chart(
        id="differences",
        title="How much do the figures differ?",
        description="B − A in % of A, with its 95 % interval. An interval over the grey line may be chance. What is "
        "better depends on the figure: lower latencies, higher reuse and goodput.",
        traces=[_trace(name, shown) for name in _LOOKS if any(one.effect == name for _, one in shown)],
        layout={
            "xaxis": {"title": {"text": "B − A, % of A"}, "ticksuffix": " %"},
            "yaxis": {"dtick": 1, "categoryorder": "array", "categoryarray": [title for title, _ in reversed(shown)]},
            "shapes": [limit_line("x", 0.0)],
        },
        header=["figure", "better is", "B − A", "result"],
        rows=[
            [title, DEFINITIONS[one.metric].better, signed_percent(one.relative), one.effect]
            for title, one in zip(titles, found, strict=True)
        ],
    )


def _trace(name: str, shown: Sequence[tuple[str, RunDifference]]) -> Trace:
    own = [(title, one) for title, one in shown if one.effect == name]
    colour, symbol = _LOOKS[name]
    points = [(_percent(one, one.difference), *(_percent(one, end) for end in one.ci95 or ())) for _, one in own]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [at for at, _, _ in points],
        "y": [title for title, _ in own],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [high - at for at, _, high in points],
            "arrayminus": [at - low for at, low, _ in points],
            "color": colour,
        },
        "marker": {"color": colour, "symbol": symbol, "size": 11},
        "hovertemplate": "%{y}: %{x:+.3g} %<extra>" + name + "</extra>",
    }


def _percent(one: RunDifference, value: float | None) -> float:
    return float(f"{100 * (value or 0.0) / abs(one.a_value or 1.0):.6g}")
