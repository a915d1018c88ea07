"""The page of a sweep or of a search for the highest rate: every level that was run, as charts with their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefixwatch.loadgen.grading.wording import number, percent, percent_interval
from prefixwatch.loadgen.report.charts import LOG_AXIS, Chart, Trace, limit_line, line
from prefixwatch.loadgen.report.page import render_page

DASHES = ("solid", "dash", "dot", "dashdot")
_RATE_TICKS = [step * 10.0**power for power in range(-2, 5) for step in (1, 2, 5)]
RATE_AXIS = {"type": "log", "tickvals": _RATE_TICKS, "ticktext": [f"{tick:g}" for tick in _RATE_TICKS]}
_UNITS = {"rate": "requests a second", "concurrency": "users"}
_STATES = {0: "pass", 1: "fail"}

Found = Mapping[str, Any]
"""The content of levels.json."""


def render_levels(found: Found, exit_code: int, config: Mapping[str, Any]) -> str:
    """One HTML page; `config` is what was run."""
    charts = level_charts(found)
    searched = found["mode"] == "search-rate"
    return render_page(
        "levels.html.j2",
        charts,
        config,
        title=f"{found['scenario']}: {found['mode']}",
        scenario=found["scenario"],
        kind="Search for the highest rate" if searched else f"Sweep over {_UNITS[_kind(found)]}",
        closed=found["mode"] == "sweep-concurrency",
        policies=found["policies"],
        sentences=level_sentences(found),
        state=_STATES.get(exit_code, "inconclusive"),
        charts=charts,
    )


def write_levels_report(path: Path, found: Found, exit_code: int, config: Mapping[str, Any]) -> None:
    """Write the page."""
    path.write_text(render_levels(found, exit_code, config), encoding="utf-8")


def level_sentences(found: Found) -> list[str]:
    """What was found, a sentence a policy."""
    if found["mode"] == "search-rate":
        return [f"{policy}: {search['statement']}" for policy, search in found["policies"].items()]
    return [_sweep_sentence(policy, sweep["steps"], _kind(found)) for policy, sweep in found["policies"].items()]


def _sweep_sentence(policy: str, steps: Sequence[Mapping[str, Any]], kind: str) -> str:
    passing = [step[kind] for step in steps if step["verdict"] == "pass"]
    spoiled = [reason for step in steps for reason in step["reasons"]]
    undecided = sum(step["verdict"] == "inconclusive" for step in steps)
    text = f"{policy}: {len(passing)} of {len(steps)} levels meet every objective with 95 % confidence"
    if passing:
        text += f", the highest {number(max(passing))} {_UNITS[kind]}"
    if undecided:
        text += f"; {undecided} had too few requests to decide"
    return f"{text}; not valid: {'; '.join(dict.fromkeys(spoiled))}" if spoiled else text


def level_charts(found: Found) -> list[Chart]:
    """Of a search, the good shares by rate; of a sweep, throughput and latency by level."""
    charts = [_good_shares(found)] if found["mode"] == "search-rate" else [_latency(found), _throughput(found)]
    return [chart for chart in charts if chart.traces]


def _kind(found: Found) -> str:
    return str(found["mode"]).removeprefix("sweep-")


def _good_shares(found: Found) -> Chart:
    traces: list[Trace] = []
    rows: list[list[str]] = []
    targets: set[float] = set()
    for place, (policy, search) in enumerate(found["policies"].items()):
        steps = sorted(search["steps"], key=lambda step: float(step["rate_per_second"]))
        names = list(dict.fromkeys(name for step in steps for name in step["objectives"]))
        for number_, name in enumerate(names):
            own = [(step["rate_per_second"], step["objectives"][name]) for step in steps if name in step["objectives"]]
            trace = line(
                place,
                f"{policy}, {name}",
                [round(rate, 4) for rate, _ in own],
                [100 * share["measured"] for _, share in own],
                dash=DASHES[number_ % len(DASHES)],
            )
            trace["error_y"] = _bars([share for _, share in own])
            traces.append(trace)
            targets |= {share["objective"] for _, share in own}
        rows += [
            [policy, number(step["rate_per_second"]), str(step["runs"]), name, *_share_cells(share), step["verdict"]]
            for step in steps
            for name, share in step["objectives"].items()
        ]
    return Chart(
        id="good-shares",
        title="Good requests by rate",
        description="Share of requests that met each objective at every rate that was run, with its 95 % interval. The "
        "grey lines are the objectives: a rate meets one with confidence when its whole bar lies above the line.",
        traces=traces,
        layout={
            "xaxis": {"title": {"text": "requests a second (logarithmic)"}, **RATE_AXIS},
            "yaxis": {"title": {"text": "good requests, %"}},
            "shapes": [limit_line("y", 100 * target) for target in sorted(targets)],
        },
        header=["policy", "req/s", "runs", "objective", "good", "95 % CI", "should be", "verdict at this rate"],
        rows=rows,
    )


def _share_cells(share: Mapping[str, Any]) -> list[str]:
    limits = share["ci95"]
    return [
        percent(share["measured"]),
        percent_interval(None if limits is None else (limits[0], limits[1])),
        percent(share["objective"]),
    ]


def _bars(shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    limits = [share["ci95"] or (share["measured"], share["measured"]) for share in shares]
    return {
        "type": "data",
        "symmetric": False,
        "array": [100 * (high - share["measured"]) for share, (_, high) in zip(shares, limits, strict=True)],
        "arrayminus": [100 * (share["measured"] - low) for share, (low, _) in zip(shares, limits, strict=True)],
    }


def _latency(found: Found) -> Chart:
    kind = _kind(found)
    traces: list[Trace] = []
    rows: list[list[str]] = []
    for place, (policy, sweep) in enumerate(found["policies"].items()):
        steps = sweep["steps"]
        x = [step[kind] for step in steps]
        for point, dash in (("p50", "dot"), ("p95", "solid")):
            y = [_value(step, f"ttft_{point}") for step in steps]
            if any(value is not None for value in y):
                traces.append(line(place, f"{policy}, {point}", x, y, dash=dash, markers=point == "p95"))
        rows += [
            [
                policy,
                number(step[kind]),
                *(number(_value(step, name)) for name in ("ttft_p50", "ttft_p95", "ttft_p99", "tpot_p95")),
                percent(_value(step, "hit_ratio")),
                step["verdict"],
            ]
            for step in steps
        ]
    return Chart(
        id="latency-by-level",
        title="Time to first token by load",
        description="Median (dotted) and p95 (solid). Where the lines turn upwards, requests begin to queue.",
        traces=traces,
        layout={
            "xaxis": {"title": {"text": _UNITS[kind]}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "TTFT, ms (logarithmic)"}, **LOG_AXIS},
        },
        header=["policy", _UNITS[kind], "TTFT p50 ms", "p95 ms", "p99 ms", "TPOT p95 ms", "hit tokens", "verdict"],
        rows=rows,
    )


def _throughput(found: Found) -> Chart:
    kind = _kind(found)
    traces: list[Trace] = []
    rows: list[list[str]] = []
    for place, (policy, sweep) in enumerate(found["policies"].items()):
        steps = [step for step in sweep["steps"] if step["throughput_rps"] is not None]
        good = [_good_rps(step) for step in steps]
        x = [step[kind] for step in steps]
        if not steps:
            continue
        traces.append(line(place, f"{policy}, completed", x, [step["throughput_rps"] for step in steps]))
        traces.append(line(place, f"{policy}, good", x, good, dash="dash", markers=False))
        rows += [
            [policy, number(step[kind]), number(step["throughput_rps"]), number(rate), step["verdict"]]
            for step, rate in zip(steps, good, strict=True)
        ]
    return Chart(
        id="throughput-by-level",
        title="Throughput by load",
        description="Completed requests a second (solid), and those that met every objective (dashed). Where the "
        "lines part, more load only makes slow answers.",
        traces=traces,
        layout={
            "xaxis": {"title": {"text": _UNITS[kind]}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "requests a second"}, "rangemode": "tozero"},
        },
        header=["policy", _UNITS[kind], "completed / s", "good / s", "verdict"],
        rows=rows,
    )


def _good_rps(step: Mapping[str, Any]) -> float | None:
    """Good requests are all among the completed ones, whose rate is known."""
    requests, good = step["grade"]["requests"], _value(step, "goodput_ratio")
    if not requests["completed"] or good is None:
        return None
    return float(step["throughput_rps"] * good * requests["scheduled"] / requests["completed"])


def _value(step: Mapping[str, Any], name: str) -> float | None:
    """A figure of a level's grade."""
    return next((figure["value"] for figure in step["grade"]["figures"] if figure["name"] == name), None)
