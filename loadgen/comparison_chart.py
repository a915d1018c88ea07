"""How much every figure of one run differs from another's, with its uncertainty, in one chart."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.charts import COLOURS, Chart, Trace, limit_line
from loadgen.comparison import METRIC_BY_NAME, Comparison
from loadgen.wording import effect, signed_percent

_LOOKS = {
    "better": (COLOURS[0], "triangle-up"),
    "worse": (COLOURS[1], "x"),
    "not significant": (COLOURS[7], "circle-open"),
}
"""Colour and marker of each effect: nothing rests on the colour alone."""


def comparison_chart(found: Sequence[Comparison], titles: Sequence[str]) -> Chart:
    """Relative differences with their 95 % intervals; `titles` are the figures' names, one for each comparison.

    What is the same in both, and what was 0 in the baseline and so has no relative difference, is left to the table.
    """
    shown = [
        (title, one)
        for title, one in zip(titles, found, strict=True)
        if one.relative is not None and one.ci95 is not None and any(one.ci95) and one.b_value
    ]
    return Chart(
        id="differences",
        title="How much do the figures differ?",
        description="B less A in % of A, with its 95 % interval. An interval over the grey line may be chance. What is "
        "better depends on the figure: lower latencies, higher reuse and goodput.",
        traces=[_trace(name, shown) for name in _LOOKS if any(effect(one) == name for _, one in shown)],
        layout={
            "xaxis": {"title": {"text": "B less A, % of A"}, "ticksuffix": " %"},
            "yaxis": {"dtick": 1, "categoryorder": "array", "categoryarray": [title for title, _ in reversed(shown)]},
            "shapes": [limit_line("x", 0.0)],
        },
        header=["figure", "better is", "B less A", "result"],
        rows=[
            [title, METRIC_BY_NAME[one.metric].better, signed_percent(one.relative), effect(one)]
            for title, one in zip(titles, found, strict=True)
        ],
    )


def _trace(name: str, shown: Sequence[tuple[str, Comparison]]) -> Trace:
    own = [(title, one) for title, one in shown if effect(one) == name]
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


def _percent(one: Comparison, value: float | None) -> float:
    return float(f"{100 * (value or 0.0) / abs(one.b_value or 1.0):.6g}")
