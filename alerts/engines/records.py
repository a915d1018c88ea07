"""Rules without the exporter: the engines' own metrics recorded under the exporter's names, from its catalogue.

A Prometheus that scrapes the engines itself then has hit rate, KV usage, queues, preemptions, hotspots and latencies
under the names that alerts, objectives and dashboards read. A target is named by its `instance`. What only request
records or KV events show (cache classes, tenants, decisions, evictions) is absent, and so are the alerts on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefixwatch.alerts.rule import RecordingRule
from prefixwatch.exporters.catalogue.model import Family, LabelRule, Signal, Source, System, shipped_catalogue
from prefixwatch.slo.read import ON_ENGINES

OBJECTIVES: Sequence[Path] = sorted(ON_ENGINES.glob("*.yaml"))
"""SLOs on what engines measure themselves."""
SEEN = "6h"
"""For how long an instance that no longer answers is remembered as an engine."""


@dataclass(frozen=True, slots=True)
class _Canonical:
    """A family of the exporter, the signal that it is made from, and its labels beside fleet, target and model."""

    family: str
    signal: str
    labels: tuple[str, ...] = ()
    combine: str = "sum"


_SERIES = (
    _Canonical("prefixwatch_prefix_query_tokens_total", "prefix_query_tokens"),
    _Canonical("prefixwatch_prefix_hit_tokens_total", "prefix_hit_tokens", ("tier",)),
    _Canonical("prefixwatch_requests_running", "running_requests"),
    _Canonical("prefixwatch_requests_waiting", "waiting_requests"),
    _Canonical("prefixwatch_kv_usage_ratio", "kv_usage_ratio", ("engine",), combine="max"),
    _Canonical("prefixwatch_preemptions_total", "preemptions"),
    _Canonical("prefixwatch_engine_prompt_tokens_total", "prompt_tokens"),
    _Canonical("prefixwatch_engine_generation_tokens_total", "generation_tokens"),
    _Canonical("prefixwatch_engine_finished_requests_total", "finished_requests", ("reason",)),
    _Canonical("prefixwatch_engine_refused_requests_total", "refused_requests"),
    _Canonical("prefixwatch_kv_capacity_blocks", "kv_capacity_blocks"),
    _Canonical("prefixwatch_block_size_tokens", "block_size_tokens", combine="max"),
    _Canonical("prefixwatch_kv_evicted_tokens_total", "evicted_tokens"),
    _Canonical("prefixwatch_speculative_draft_tokens_total", "speculative_draft_tokens"),
    _Canonical("prefixwatch_speculative_accepted_tokens_total", "speculative_accepted_tokens"),
    _Canonical("prefixwatch_kv_transfer_bytes_total", "kv_transfer_bytes", ("source", "destination")),
    _Canonical("prefixwatch_kv_transfer_failures_total", "kv_transfer_failures", ("source", "destination")),
)
_HISTOGRAMS = {
    "prefixwatch_engine_ttft_seconds": "ttft_seconds",
    "prefixwatch_engine_inter_token_seconds": "inter_token_seconds",
    "prefixwatch_engine_tpot_seconds": "tpot_seconds",
    "prefixwatch_engine_prefill_seconds": "prefill_seconds",
    "prefixwatch_engine_e2e_seconds": "e2e_seconds",
    "prefixwatch_engine_queue_seconds": "queue_seconds",
    "prefixwatch_engine_request_prompt_tokens": "request_prompt_tokens",
    "prefixwatch_engine_request_computed_tokens": "request_computed_tokens",
    "prefixwatch_engine_request_generation_tokens": "request_generation_tokens",
    "prefixwatch_kv_block_lifetime_seconds": "kv_block_lifetime",
    "prefixwatch_kv_block_idle_before_evict_seconds": "kv_block_idle_before_evict",
    "prefixwatch_kv_transfer_seconds": "kv_transfer",
}
_ENDS = ("source", "destination")
"""Labels of a transfer's histogram."""


def engine_records(fleet: Sequence[str]) -> list[RecordingRule]:
    """Recording rules of the exporter's families, by the labels that separate fleets."""
    systems = _engines()
    rules = [_record(one.family, _series(one, systems, fleet)) for one in _SERIES]
    for family, signal in _HISTOGRAMS.items():
        own = _ENDS if signal == "kv_transfer" else ()
        for suffix, labels in (("_bucket", ("le",)), ("_count", ()), ("_sum", ())):
            one = _Canonical(family + suffix, signal, (*own, *labels))
            rules.append(_record(one.family, _series(one, systems, fleet, suffix)))
    return rules


def worker_records(fleet: Sequence[str]) -> list[RecordingRule]:
    """What `engine_records` shows of each instance: its load, whether it is up and since when not, what it lost."""
    systems = _engines()
    by = ", ".join((*fleet, "model", "target"))
    load = f"sum by ({by}) (prefixwatch_requests_running)\n+ on ({by}) sum by ({by}) (prefixwatch_requests_waiting)"
    up = _target_up(systems, fleet)
    seen = f"max_over_time((timestamp({up.name} == 1))[{SEEN}:1m])"
    age = f"time() - max by ({by}) ({seen})"
    return [
        _record("prefixwatch_worker_load_requests", load),
        up,
        _record("prefixwatch_scrape_age_seconds", age),
        _missing(systems, fleet),
        _started(systems, fleet),
        _discovered(systems, fleet),
    ]


def _engines() -> list[System]:
    catalogue = shipped_catalogue()
    return [system for name in catalogue.names if (system := catalogue.get(name)).role == "engine"]


def _missing(systems: Iterable[System], fleet: Sequence[str]) -> RecordingRule:
    """Signals that a system must give and that no series of an instance that is up shows."""
    families = {one.signal: one.family for one in _SERIES}
    ways = []
    for system in systems:
        for name, signal in system.signals.items():
            if signal.required and name in families:
                up = f'prefixwatch_target_up{{system="{system.system}"}} == 1'
                lost = f"{up} unless on ({', '.join((*fleet, 'target'))}) {families[name]}"
                ways.append(f'label_replace({lost}, "signal", "{name}", "", "")')
    by = ", ".join((*fleet, "model", "target", "signal"))
    return _record("prefixwatch_missing_signal", f"max by ({by}) (\n  " + "\n  or ".join(ways) + "\n)")


def _record(name: str, expr: str) -> RecordingRule:
    return RecordingRule(name, expr, {})


def _series(one: _Canonical, systems: Iterable[System], fleet: Sequence[str], suffix: str = "") -> str:
    """Every engine system's way of giving the signal; of several ways that one page has, the first counts."""
    ways = [
        way
        for system in systems
        if (signal := system.signals.get(one.signal)) is not None
        for source in signal.sources
        if (way := _way(one, signal, source, fleet, suffix)) is not None
    ]
    return f"\nor on ({', '.join((*fleet, 'target'))})\n".join(dict.fromkeys(ways))


def _way(one: _Canonical, signal: Signal, source: Source, fleet: Sequence[str], suffix: str) -> str | None:
    families = [family for family in source.families if _recordable(family, suffix)]
    if not families:
        return None
    by = ", ".join((*fleet, "model", "target", *one.labels))
    selected = "\n  or ".join(_labelled(family, signal, one, fleet, suffix) for family in families)
    return f"{one.combine} by ({by}) (\n  {selected}\n)"


def _recordable(family: Family, suffix: str) -> bool:
    """Whether PromQL can: a name with a pattern, ranges as labels and scaled bounds can't be."""
    return not ("*" in family.name or family.buckets_from or (suffix and family.scale != 1))


def _labelled(family: Family, signal: Signal, one: _Canonical, fleet: Sequence[str], suffix: str) -> str:
    """One family's samples with canonical labels instead of the system's own."""
    only = ", ".join(f'{name}="{value}"' for name, value in family.only.items())
    expr = f"{family.name}{suffix}{{{only}}}" if only else family.name + suffix
    if family.scale != 1:
        expr = f"{expr} * {family.scale:g}"
    rules: Mapping[str, LabelRule] = {**signal.labels, **family.labels}
    for label in ("model", *(label for label in one.labels if label != "le")):
        if label in rules:
            expr = _with_label(expr, label, rules[label])
    return f'label_replace({expr}, "target", "$1", "instance", "(.+)")'


def _with_label(expr: str, label: str, rule: LabelRule) -> str:
    constant = rule.value if rule.source is None else rule.default
    if constant is not None:
        expr = f'label_replace({expr}, "{label}", "{constant}", "", "")'
    if rule.source is None:
        return expr
    if rule.otherwise is not None:
        expr = f'label_replace({expr}, "{label}", "{rule.otherwise}", "{rule.source}", ".+")'
    elif rule.source != label:
        expr = f'label_replace({expr}, "{label}", "$1", "{rule.source}", "(.+)")'
    # The last replacement stands: patterns before whole values, and of two patterns the first as the last.
    patterns = [raw for raw in rule.map if "*" in raw]
    for raw in (*reversed(patterns), *(raw for raw in rule.map if raw not in patterns)):
        value = rule.map[raw]
        if raw != value or rule.otherwise is not None:
            expr = f'label_replace({expr}, "{label}", "{value}", "{rule.source}", "{_pattern(raw)}")'
    return expr


def _pattern(raw: str) -> str:
    """A value of the catalogue's as PromQL's regular expression; one with `*` in any case, as the exporter reads it."""
    if "*" not in raw:
        return re.escape(raw).replace("\\", "\\\\")
    return "(?i)" + ".*".join(re.escape(part).replace("\\", "\\\\") for part in raw.split("*"))


def _known(systems: Iterable[System]) -> list[tuple[System, str]]:
    """The instances that were an engine of each system within the last hours, by job, instance and model."""
    ways = []
    for system in systems:
        signal = system.signals.get("running_requests")
        for source in signal.sources if signal is not None else ():
            for family in source.families:
                only = ", ".join(f'{name}="{value}"' for name, value in family.only.items())
                seen = (
                    f"last_over_time({family.name}{{{only}}}[{SEEN}])"
                    if only
                    else f"last_over_time({family.name}[{SEEN}])"
                )
                model = signal.labels.get("model") if signal is not None else None
                named = seen if model is None else _with_label(seen, "model", model)
                ways.append((system, f"group by (job, instance, model) ({named})"))
    return ways


def _target_up(systems: Iterable[System], fleet: Sequence[str]) -> RecordingRule:
    """`up` of every engine, with its model and system."""
    ways = []
    for system, known in _known(systems):
        up = f"up * on (job, instance) group_left (model) {known}"
        up = f'label_replace({up}, "system", "{system.system}", "", "")'
        ways.append(f'label_replace({up}, "target", "$1", "instance", "(.+)")')
    by = ", ".join((*fleet, "model", "target", "system"))
    return _record("prefixwatch_target_up", f"max by ({by}) (\n  " + "\n  or ".join(dict.fromkeys(ways)) + "\n)")


def _started(systems: Iterable[System], fleet: Sequence[str]) -> RecordingRule:
    """The last start of an engine of each model, by what its process says."""
    join = "process_start_time_seconds * on (job, instance) group_left (model)"
    ways = "\n  or ".join(dict.fromkeys(f"{join} {known}" for _, known in _known(systems)))
    return _record("prefixwatch_engine_started_seconds", f"max by ({', '.join((*fleet, 'model'))}) (\n  {ways}\n)")


def _discovered(systems: Iterable[System], fleet: Sequence[str]) -> RecordingRule:
    """Targets of each scrape job that has engines: Prometheus discovers them, so its jobs are the discoveries."""
    known = "\n  or ".join(dict.fromkeys(known for _, known in _known(systems)))
    jobs = f'label_replace(up and on (job) (\n  {known}\n), "discovery", "$1", "job", "(.+)")'
    return _record("prefixwatch_discovered_targets", f"count by ({', '.join((*fleet, 'discovery'))}) ({jobs})")
