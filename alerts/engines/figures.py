"""What the exporter computes from engines' metrics in its window, as recording rules over 5 minutes.

Used where there is no exporter (`alerts.engines.records`): hit ratios and latencies of single workers, how uneven their
load is, and goodput between two bounds. Thresholds are those of the SLO documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prefixwatch.alerts.rule import RecordingRule
from prefixwatch.exporters.fleet.derivation import MIN_FLEET_LOAD, OVERLOAD_FACTOR
from prefixwatch.exporters.metrics_page.families import MIN_OBSERVATIONS
from prefixwatch.slo.buckets import le_matcher
from prefixwatch.slo.rule_model import HistogramIndicator, RatioIndicator, SloDefinition

WINDOW = "5m"
_FINISHED = "prefixwatch_engine_finished_requests_total"
_PER_REQUEST: Mapping[str, str] = {
    "prefixwatch_engine_ttft_seconds": "prefixwatch_engine_ttft_seconds",
    "prefixwatch_engine_inter_token_seconds": "prefixwatch_engine_tpot_seconds",
    "prefixwatch_engine_e2e_seconds": "prefixwatch_engine_e2e_seconds",
}
"""An objective's histogram → the one that has one observation a request, which alone can bound goodput."""
_LATENCIES = (("ttft", 0.95, "prefixwatch_engine_ttft_seconds"),
              ("inter_token", 0.5, "prefixwatch_engine_inter_token_seconds"))  # fmt: skip
"""By which workers are compared, as on the exporter's page."""


def figure_records(fleet: Sequence[str], slos: Sequence[SloDefinition]) -> list[RecordingRule]:
    """Rules over the families of `alerts.engines.records`, by the labels that separate fleets."""
    scope = ", ".join((*fleet, "model"))
    worker = f"{scope}, target"
    return [
        RecordingRule("prefixwatch_prefix_hit_ratio", _hit_ratio(worker), {"source": "cache"}),
        RecordingRule("prefixwatch_engine_latency_quantile_seconds", _latencies(worker), {}),
        *_hotspots(scope, worker),
        *_goodput(scope, slos),
    ]


def _hit_ratio(worker: str) -> str:
    hits, queries = (
        f"sum by ({worker}) (rate(prefixwatch_prefix_{kind}_tokens_total[{WINDOW}]))" for kind in ("hit", "query")
    )
    return f"{hits}\n/ on ({worker}) ({queries} > 0)"


def _latencies(worker: str) -> str:
    ways = []
    for latency, quantile, family in _LATENCIES:
        expr = (
            f"histogram_quantile({quantile:g}, sum by (le, {worker}) (rate({family}_bucket[{WINDOW}])))\n"
            f"and on ({worker}) sum by ({worker}) (increase({family}_count[{WINDOW}])) >= {MIN_OBSERVATIONS}"
        )
        for label, value in (("latency", latency), ("quantile", f"{quantile:g}")):
            expr = f'label_replace({expr}, "{label}", "{value}", "", "")'
        ways.append(expr)
    return "\nor ".join(ways)


def _hotspots(scope: str, worker: str) -> Iterable[RecordingRule]:
    """Of the mean load of the window, where at least a request is in flight on average: of peers of one model."""
    load = f"avg_over_time(prefixwatch_worker_load_requests[{WINDOW}])"
    busy = (
        f"and on ({scope}) sum by ({scope}) ({load}) >= {MIN_FLEET_LOAD:g}\n"
        f"and on ({scope}) count by ({scope}) ({load}) > 1"
    )
    mean = f"on ({scope}) group_left () avg by ({scope}) ({load})"
    figures = {
        "max_over_mean": f"max by ({scope}) ({load}) / on ({scope}) avg by ({scope}) ({load})",
        "busiest_over_least": f"max by ({scope}) ({load}) / on ({scope}) min by ({scope}) ({load})",
        "overloaded_ratio": f"avg by ({scope}) ({load} > bool {mean} * {OVERLOAD_FACTOR:g})",
    }
    for name, expr in figures.items():
        yield RecordingRule(f"prefixwatch_hotspot_{name}", f"{expr}\n{busy}", {})
    served = f"sum by ({worker}) (increase({_FINISHED}[{WINDOW}]))"
    share = f"max by ({scope}) ({served}) / on ({scope}) (sum by ({scope}) ({served}) >= {MIN_OBSERVATIONS})"
    yield RecordingRule("prefixwatch_hotspot_top_share_ratio", share, {})


def _goodput(scope: str, slos: Sequence[SloDefinition]) -> Iterable[RecordingRule]:
    """Fréchet's bounds (`exporters.fleet.goodput_bounds`). A share that engines don't give could lower it to 0."""
    shares = [share for slo in slos if (share := _share(scope, slo)) is not None]
    if not shares:
        return
    lacking = len(shares) - 1
    known = "\nor ".join(f'label_replace({share}, "part", "{number}", "", "")' for number, share in enumerate(shares))
    together = f"\n+ on ({scope}) ".join(f"({share})" for share in shares)
    least = f"clamp_min({together} - {lacking}, 0)\nor on ({scope}) 0 * min by ({scope}) ({known})"
    yield RecordingRule("prefixwatch_goodput_least_ratio", least, {})
    yield RecordingRule("prefixwatch_goodput_most_ratio", f"min by ({scope}) ({known})", {})


def _share(scope: str, slo: SloDefinition) -> str | None:
    """The share of a model's requests that met one objective; None for one that isn't of requests."""
    indicator = slo.indicator
    if isinstance(indicator, RatioIndicator) and indicator.bad and indicator.total.metric == _FINISHED:
        bad, total = (f"sum by ({scope}) (rate({side}[{WINDOW}]))" for side in (indicator.bad, indicator.total))
        return f"1 - ({bad} or on ({scope}) 0 * {total}) / on ({scope}) ({total} > 0)"
    if not isinstance(indicator, HistogramIndicator) or indicator.above:
        return None
    family = _PER_REQUEST.get(indicator.histogram.metric)
    if family is None:
        return None
    good = f"sum by ({scope}) (rate({family}_bucket{{{le_matcher(indicator.bound)}}}[{WINDOW}]))"
    return f"{good} / on ({scope}) (sum by ({scope}) (rate({family}_count[{WINDOW}])) > 0)"
