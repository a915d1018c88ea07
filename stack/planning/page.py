"""The page of `plan`: what more GPUs buy, by policy and cache size, and the fleets that no other one beats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefixwatch.loadgen.grading.wording import UNKNOWN, number, percent
from prefixwatch.loadgen.report.charts import COLOURS, Chart, limit_line, line
from prefixwatch.loadgen.report.page import render_page

Fleet = Mapping[str, Any]
"""An element of a plan's `fleets`."""


def pareto_front(fleets: Sequence[Fleet]) -> list[Fleet]:
    """Those for which no other one costs as little and serves as well, the cheapest first."""
    front: list[Fleet] = []
    for fleet in sorted(fleets, key=lambda each: (each["gpu_hours"], -each["margin"])):
        if not front or fleet["margin"] > front[-1]["margin"]:
            front.append(fleet)
    return front


def plan_charts(result: Mapping[str, Any]) -> list[Chart]:
    """The front, and what the answers cost, if there are any."""
    found = any(plan["workers"] for plan in result["plans"])
    return [_front(result), *([_hours(result)] if found else [])]


def _label(plan: Mapping[str, Any]) -> str:
    return f"{plan['policy']}, cache {plan['cache_size']:g} ×"


def _front(result: Mapping[str, Any]) -> Chart:
    traces, every = [], []
    for place, plan in enumerate(result["plans"]):
        fleets = _worst_of_seeds(plan["fleets"])
        every += [{**fleet, "label": _label(plan)} for fleet in fleets]
        trace = line(place, _label(plan), *_points(fleets))
        trace |= {"text": [f"{fleet['workers']} engines" for fleet in fleets], "hoverinfo": "text+name+x+y"}
        traces.append(trace)
    front = pareto_front(every)
    best: dict[str, Any] = {"type": "scatter", "name": "no other fleet is as cheap and as good", "mode": "markers"}
    best["x"], best["y"] = _points(front)
    best["marker"] = {"symbol": "circle-open", "size": 15, "color": "#000000", "line": {"width": 2}}
    rows = [
        [fleet["label"], str(fleet["workers"]), number(fleet["gpu_hours"]), f"{100 * fleet['margin']:+.1f}"]
        for fleet in front
    ]
    return Chart(
        id="front",
        title="What more GPUs buy",
        description="Each point is a simulated fleet: how far its tightest objective is above its target (of several "
        "seeds the worst). At or above 0 the fleet holds; the circled ones are the Pareto front.",
        traces=[*traces, best],
        layout={
            "xaxis": {"title": {"text": "GPU hours"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "points above target"}},
            "shapes": [limit_line("y", 0.0)],
        },
        header=["on the front", "engines", "GPU hours", "tightest objective, points"],
        rows=rows,
    )


def _points(fleets: Sequence[Fleet]) -> tuple[list[float], list[float]]:
    return [fleet["gpu_hours"] for fleet in fleets], [100 * fleet["margin"] for fleet in fleets]


def _worst_of_seeds(fleets: Sequence[Fleet]) -> list[Fleet]:
    """One per size; those with an objective that no request counts for are left out."""
    of_size: dict[int, list[Fleet]] = defaultdict(list)
    for fleet in fleets:
        if fleet["margin"] is not None:
            of_size[fleet["workers"]].append(fleet)
    return [min(own, key=lambda each: float(each["margin"])) for _, own in sorted(of_size.items())]


def _hours(result: Mapping[str, Any]) -> Chart:
    answers = [plan for plan in result["plans"] if plan["workers"]]
    bars = [
        {
            "type": "bar",
            "name": name,
            "x": [_label(plan) for plan in answers],
            "y": [plan[key] for plan in answers],
            "marker": {"color": COLOURS[place]},
        }
        for place, (name, key) in enumerate((("fixed fleet", "gpu_hours"), ("instant scaling", "ideal_gpu_hours")))
    ]
    rows = [
        [
            _label(plan),
            str(plan["workers"] or "none"),
            number(plan.get("gpu_hours")),
            number(plan.get("ideal_gpu_hours")),
            UNKNOWN if plan["hit_ratio"] is None else percent(plan["hit_ratio"]),
        ]
        for plan in result["plans"]
    ]
    return Chart(
        id="hours",
        title="The smallest fleets that hold",
        description="GPU hours for this traffic: of a fleet that stays as large as the peak needs, and of one that "
        "followed the rate at once.",
        traces=bars,
        layout={"barmode": "group", "yaxis": {"title": {"text": "GPU hours"}, "rangemode": "tozero"}},
        header=["policy", "engines", "GPU hours", "instant scaling", "hit tokens"],
        rows=rows,
    )


def plan_sentences(result: Mapping[str, Any]) -> list[str]:
    """The answer by policy, and what it rests on."""
    hardware, target = result["profile"], ", ".join(result["objectives"])
    found = [
        f"{_label(plan)}: {plan['workers']} engines meet {target}."
        if plan["workers"]
        else f"{_label(plan)}: no fleet up to {max(each['workers'] for each in plan['fleets'])} engines meets {target}."
        for plan in result["plans"]
    ]
    return [*found, f"Measured: {hardware['measured']}", f"Assumed: {hardware['assumed']}", *result["notes"]]


def write_plan_page(path: Path, result: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write the page; `config` is what was planned."""
    charts = plan_charts(result)
    page = render_page(
        "levels.html.j2",
        charts,
        config,
        title=f"{result['traffic']}: how many engines?",
        scenario=result["traffic"],
        kind=f"Smallest fleet of {result['profile']['name']}",
        figures_file="plan.json",
        closed=False,
        policies=[plan["policy"] for plan in result["plans"]],
        sentences=plan_sentences(result),
        state="pass" if all(plan["workers"] for plan in result["plans"]) else "fail",
        charts=charts,
    )
    path.write_text(page, encoding="utf-8")
