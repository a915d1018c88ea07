"""The page of `--tune`: hits against balance and against TTFT, by the value of the option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefixwatch.loadgen.grading.wording import number, percent
from prefixwatch.loadgen.report.charts import Chart, line
from prefixwatch.loadgen.report.page import render_page

_AXES = {
    "in_flight_max_over_mean": ("tune-balance", "Hits against balance", "in flight, busiest worker / mean"),
    "ttft_p95_ms": ("tune-ttft", "Hits against TTFT", "TTFT p95, ms"),
}


def tune_charts(result: Mapping[str, Any]) -> list[Chart]:
    """One chart per price of the hits; the tuned traffic is solid, the held-back one dashed."""
    return [_chart(result, figure) for figure in _AXES]


def _chart(result: Mapping[str, Any], figure: str) -> Chart:
    id_, title, axis = _AXES[figure]
    traces, rows = [], []
    for name, dash in (("tuned", "solid"), ("held back", "dash")):
        for kind, mode in (("points", "lines+markers+text"), ("beside", "markers+text")):
            points = [
                (own.get("value", own.get("policy")), own if name == "tuned" else own["held_back"])
                for own in result[kind]
            ]
            rows += [[name, label, percent(own["hit_ratio"]), number(own[figure])] for label, own in points]
            known = [(label, own) for label, own in points if None not in (own[figure], own["hit_ratio"])]
            if known:
                traces.append(_trace(figure, name if kind == "points" else f"{name}, beside", known, mode, dash))
    return Chart(
        id=id_,
        title=title,
        description=f"Each point is a value of {result['option']}. Up and to the left is better.",
        traces=traces,
        layout={"xaxis": {"title": {"text": axis}}, "yaxis": {"title": {"text": "hit tokens, %"}}},
        header=["traffic", result["option"], "hit tokens", axis],
        rows=rows,
    )


def _trace(figure: str, name: str, known: Sequence[tuple[str, Any]], mode: str, dash: str) -> dict[str, Any]:
    trace = line(0, name, [own[figure] for _, own in known], [100 * own["hit_ratio"] for _, own in known], dash=dash)
    return trace | {"mode": mode, "text": [label for label, _ in known], "textposition": "top center"}


def write_tune_report(path: Path, scenario: str, result: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write the page; `config` is what was run."""
    charts = tune_charts(result)
    page = render_page(
        "levels.html.j2",
        charts,
        config,
        title=f"{scenario}: {result['policy']}.{result['option']}",
        scenario=scenario,
        kind=f"Values of {result['option']}",
        figures_file="tune.json",
        closed=False,
        policies=[result["policy"]],
        sentences=[result["statement"]],
        state="pass" if result["holds"] else "inconclusive",
        charts=charts,
    )
    path.write_text(page, encoding="utf-8")
