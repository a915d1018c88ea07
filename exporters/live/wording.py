"""Figures and data-quality flags as people read them. None is unknown: a dash."""

from __future__ import annotations

from collections.abc import Mapping

UNKNOWN = "–"
_THOUSAND, _MILLION, _BILLION = 1e3, 1e6, 1e9


def percent(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else f"{ratio * 100:.0f} %"


def share(ratio: float | None) -> str:
    """A percentage with the digits that an objective needs."""
    return UNKNOWN if ratio is None else f"{ratio * 100:.4g} %"


def seconds(value: float | None) -> str:
    """In ms below a second."""
    if value is None:
        return UNKNOWN
    return f"{value:.2f} s" if abs(value) >= 1 else f"{value * 1000:.3g} ms"


def count(value: float | None) -> str:
    """Three digits and a unit of thousands above 10,000."""
    if value is None:
        return UNKNOWN
    for size, unit in ((_BILLION, "G"), (_MILLION, "M"), (10 * _THOUSAND, "k")):
        if abs(value) >= size:
            return f"{value / (_THOUSAND if unit == 'k' else size):.3g} {unit}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.2g}"


FLAG_WORDS: Mapping[str, str] = {
    "labels_overflowed": "a label had more values than `limits.label_values`: the rest count as `other`",
    "stale": "no good scrape for three intervals",
    "several_processes": "several processes answer at its address in turn, and its gauges are of one of them",
    "several_engines": "its page shows several engines, and no known label distinguishes them",
    "tls_unverified": "its certificate is not checked: anybody could answer for it",
    "missing_family": "a metric that this system should have is missing from its page",
    "frozen_engine": "it shows an engine that has stood still with requests: gone, or hanging",
    "counter_reset": "its counters began again: restarted",
    "preemption_inflated": "tokens recomputed after preemptions are booked as hits",
    "lookup_skipped": "some prompts were never looked up in the cache",
    "missing_observations": "its histograms lack requests that it counted",
    "prefix_caching_off": "prefix caching is off",
    "dead_hit_counter": "its hit counter stands still although blocks are reused",
    "double_counted": "lookups are counted more than once",
    "hits_by_transfer": "its prompts arrive by KV transfer: that is work handed over, not reuse",
    "load_disagrees": "its gauges of running and waiting requests contradict the times that requests took",
    "renamed_family": "a family looks like one that is missing under another name, and isn't read",
    "times_disagree": "its times contradict each other, its load or the clock: another unit, or a sum over ranks",
    "records_disagree": "its hit counters contradict the cached tokens of the request records",
    "identity_disagrees": "it is configured as another model or role than its page names",
    "cached_all_but_one": "new prompts are reported as cached except for one token: prefill may run elsewhere",
    "misses_unreported": "its answers report cached tokens only where there are some: hit ratios by them are too high",
    "impossible_ratio": "more hits than lookups",
    "last_rank_only": "gauges are of one data-parallel rank only",
    "ranks_missing": "fewer ranks report than the deployment has",
    "ttft_is_whole_answer": "its first-token times are of whole answers",
    "ttft_without_queue": "its first-token times leave out the queue",
    "stuck_in_one_bucket": "all its first-token times are in one outermost bucket",
    "implausible_latency": "first tokens come faster than any engine can",
    "type_mismatch": "its page declares a family as another kind than the catalogue reads it as",
    "family_twice": "its page declares a family more than once",
    "schema_changed": "a family that was read from its page has gone from it",
    "unmapped_label": "a label has a value that the catalogue doesn't know: it counts as `unknown`",
    "wrong_content_type": "its page is declared as something else than metrics",
    "layer_silent": "a configured layer has no family on its page",
    "malformed_lines": "lines of its page can't be read, or have no number",
    "duplicate_series": "its page has a series twice",
    "mixed_buckets": "its bucket bounds differ from other targets'",
    "kv_events_unknown": "no KV events arrive",
    "kv_events_missed": "KV events were lost for good",
    "kv_events_unreadable": "KV events could not be read: blocks are missing, or were dropped with them",
    "hybrid_cache": "its model has cache groups besides full attention: less can be reused than its blocks say",
    "index_gap": "it may hold blocks that nobody saw stored",
    "stale_index": "KV events are late or cut off",
    "cached_exceeds_prompt": "records have more cached tokens than prompt",
    "ttft_near_e2e": "records have first tokens as late as the last",
    "bad_records": "records have figures below 0",
    "several_routers": "several routers answer at its address: give each its own target",
    "shared_workers": "another router sends to its workers too",
}


def flag_words(flag: str) -> str:
    """What a raised flag means for the target's numbers; a flag without words is shown by its name."""
    return FLAG_WORDS.get(flag, flag.replace("_", " "))
