"""What the engines did while the load ran, as charts on the load generator's clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from prefixwatch.loadgen.grading.wording import UNKNOWN, number, percent
from prefixwatch.loadgen.report.charts import Chart, Trace, line
from prefixwatch.loadgen.request_log.fleet_rows import FleetRow
from prefixwatch.slo.objective import Floats

TIME_BINS = 30
_COUNTS = ("kv_blocks_stored_total", "kv_blocks_removed_total", "kv_cache_clears_total")
_LEVELS = ("running", "waiting")

Runs = Mapping[str, Sequence[FleetRow]]


def fleet_charts(rows: Sequence[FleetRow]) -> list[Chart]:
    """All that there is data for."""
    timed = [row for row in rows if row.at_s is not None]
    if not timed:
        return []
    by_policy: dict[str, list[FleetRow]] = {}
    for row in timed:
        by_policy.setdefault(row.policy, []).append(row)
    last = max(row.at_s or 0.0 for row in timed)
    edges = np.linspace(0, max(last, 1.0), min(TIME_BINS, max(1, int(last))) + 1)
    return [chart for chart in (_kv_events(by_policy, edges), _queues(by_policy, edges)) if chart.traces]


def _kv_events(runs: Runs, edges: Floats) -> Chart:
    traces: list[Trace] = []
    table: list[list[str]] = []
    missed = 0
    for place, (policy, rows) in enumerate(runs.items()):
        found = _Increases.of(rows, edges)
        if found is None:
            continue
        missed += max((row.kv_batches_missed_total or 0 for row in rows), default=0)
        stored, removed, clears = found.per_second
        x = _middles(edges)
        for name, values, dash in (("stored", stored, "solid"), ("removed", removed, "dash")):
            traces.append(line(place, f"{policy}, {name}", x, _round(values), dash=dash, markers=dash == "solid"))
        table += [
            [
                policy,
                number(x[k]),
                number(float(stored[k])),
                number(float(removed[k])),
                number(float(found.busiest_stored[k])),
                number(float(clears[k] * found.width_s * found.repeats)),
            ]
            for k in range(len(x))
        ]
    lower = " Some event batches never came, so these are lower bounds." if missed else ""
    return Chart(
        id="kv-events",
        title="KV blocks stored and removed",
        description="Blocks a second by the engines' own KV events, all workers together, mean of the repeats. Removed "
        f"blocks (dashed) are evictions: prefixes that will have to be computed again.{lower}",
        traces=traces,
        layout={
            "xaxis": {"title": {"text": "time in the run, s"}},
            "yaxis": {"title": {"text": "blocks a second"}, "rangemode": "tozero"},
        },
        header=["policy", "time s", "stored / s", "removed / s", "busiest worker, stored / s", "caches cleared"],
        rows=table,
    )


def _queues(runs: Runs, edges: Floats) -> Chart:
    traces: list[Trace] = []
    table: list[list[str]] = []
    x = _middles(edges)
    for place, (policy, rows) in enumerate(runs.items()):
        running, waiting = (_mean_sum(rows, name, edges) for name in _LEVELS)
        if np.isnan(running).all():
            continue
        traces.append(line(place, f"{policy}, running", x, _round(running)))
        traces.append(line(place, f"{policy}, waiting", x, _round(waiting), dash="dot", markers=False))
        usage = _mean_sum(rows, "kv_usage_ratio", edges, mean_of_workers=True) * 100
        columns = (running, waiting, usage)
        table += [
            [policy, number(x[k]), *(number(None if np.isnan(c[k]) else float(c[k])) for c in columns)]
            for k in range(len(x))
        ]
    return Chart(
        id="engine-load",
        title="Requests in the engines",
        description="Running (solid) and waiting (dotted) as the engines report them once a second, all workers "
        "together, mean of the repeats. A waiting line that climbs is a queue in the engines, not in the client.",
        traces=traces,
        layout={
            "xaxis": {"title": {"text": "time in the run, s"}},
            "yaxis": {"title": {"text": "requests"}, "rangemode": "tozero"},
        },
        header=["policy", "time s", "running", "waiting", "KV cache in use, %"],
        rows=table,
    )


WORKERS = ("worker", "policy", "readings", "running, mean", "KV in use, most", "looked up, tokens", "of all", "hits")


def worker_rows(rows: Sequence[FleetRow]) -> list[list[str]]:
    """In the order of `WORKERS`: each worker under each policy, by its own counters; unknown where one was reset."""
    found: dict[tuple[str, str], dict[int, list[FleetRow]]] = {}
    for row in rows:
        found.setdefault((row.policy, row.worker), {}).setdefault(row.repeat, []).append(row)
    figures = {
        key: [_sum(_grown(run, f"prefix_{name}_tokens_total") for run in runs.values()) for name in ("query", "hit")]
        for key, runs in found.items()
    }
    table = []
    for (policy, worker), runs in sorted(found.items(), key=lambda each: (each[0][1], list(found).index(each[0]))):
        own = [row for run in runs.values() for row in run]
        queried, hits = figures[policy, worker]
        everybody = _sum(figures[key][0] for key in figures if key[0] == policy)
        running = [row.running for row in own if row.running is not None]
        usage = [row.kv_usage_ratio for row in own if row.kv_usage_ratio is not None]
        table.append(
            [
                worker,
                policy,
                f"{len(own):,}",
                number(float(np.mean(running)) if running else None),
                percent(max(usage, default=None)),
                UNKNOWN if queried is None else f"{queried:,.0f}",
                percent(_share(queried, everybody)),
                percent(_share(hits, queried)),
            ]
        )
    return table


def _grown(rows: Sequence[FleetRow], name: str) -> float | None:
    """What a total grew by over a run; None without both ends, or with a reset."""
    known = [value for row in rows if (value := getattr(row, name)) is not None]
    if len(known) < 2 or any(later < earlier for earlier, later in pairwise(known)):
        return None
    return float(known[-1] - known[0])


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else float(sum(value for value in known if value is not None))


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


@dataclass(frozen=True, slots=True)
class _Increases:
    per_second: Sequence[Floats]
    """Of `_COUNTS`, all workers together, mean of the repeats."""
    busiest_stored: Floats
    """Of the worker that stored most in the whole run."""
    repeats: int
    width_s: float

    @classmethod
    def of(cls, rows: Sequence[FleetRow], edges: Floats) -> _Increases | None:
        """None where no engine publishes events."""
        series: dict[tuple[int, str], list[FleetRow]] = {}
        for row in rows:
            if row.kv_blocks_stored_total is not None:
                series.setdefault((row.repeat, row.worker), []).append(row)
        if not series:
            return None
        repeats, width = len({repeat for repeat, _ in series}), float(edges[1] - edges[0])
        sums = [np.zeros(len(edges) - 1) for _ in _COUNTS]
        stored_by_worker: dict[str, Floats] = {}
        for (_, worker), own in series.items():
            for place, name in enumerate(_COUNTS):
                found = _binned_increase(own, name, edges)
                sums[place] += found
                if not place:
                    stored_by_worker[worker] = stored_by_worker.get(worker, 0.0) + found
        scale = 1 / (width * repeats)
        busiest = max(stored_by_worker.values(), key=lambda values: float(values.sum()))
        return cls([values * scale for values in sums], busiest * scale, repeats, width)


def _binned_increase(rows: Sequence[FleetRow], name: str, edges: Floats) -> Floats:
    """What a total grew by, spread evenly over the time between two readings, by stretch of time."""
    times = np.array([row.at_s for row in rows], dtype=np.float64)
    totals = np.array([getattr(row, name) for row in rows], dtype=np.float64)
    return np.diff(np.interp(edges, times, totals))


def _mean_sum(rows: Sequence[FleetRow], name: str, edges: Floats, *, mean_of_workers: bool = False) -> Floats:
    """Mean over a stretch's readings of the workers' sum (or mean); NaN where there is none."""
    workers = len({row.worker for row in rows})
    known = [row for row in rows if getattr(row, name) is not None]
    places = np.searchsorted(edges, [row.at_s or 0.0 for row in known], side="right") - 1
    values = np.array([getattr(row, name) for row in known], dtype=np.float64)
    inside = (places >= 0) & (places < len(edges) - 1)
    counts = np.bincount(places[inside], minlength=len(edges) - 1)
    sums = np.bincount(places[inside], weights=values[inside], minlength=len(edges) - 1)
    means: Floats = np.full(len(edges) - 1, np.nan)
    means[counts > 0] = sums[counts > 0] / counts[counts > 0]
    return means if mean_of_workers else means * workers


def _middles(edges: Floats) -> list[float]:
    return [round(float(middle), 3) for middle in (edges[:-1] + edges[1:]) / 2]


def _round(values: Floats) -> list[float | None]:
    return [None if np.isnan(value) else float(f"{value:.6g}") for value in values]
