"""Data-quality flags in words: what a raised one means for who reads the target's numbers."""

from __future__ import annotations

from collections.abc import Mapping

FLAG_WORDS: Mapping[str, str] = {
    "stale": "no good scrape for three intervals",
    "tls_unverified": "its certificate is not checked: anybody could answer for it",
    "missing_family": "a metric that this system should have is missing from its page",
    "frozen_engine": "it shows an engine that has stood still with requests: gone, or hanging",
    "counter_reset": "its counters began again: restarted",
    "preemption_inflated": "tokens recomputed after preemptions are booked as hits",
    "lookup_skipped": "some prompts were never looked up in the cache",
    "missing_observations": "its histograms lack requests that it counted",
    "prefix_caching_off": "prefix caching is off",
    "dead_hit_counter": "its hit counter stands still although blocks are reused",
    "double_counted": "prompts are counted twice",
    "impossible_ratio": "more hits than lookups",
    "last_rank_only": "gauges are of one data-parallel rank only",
    "ranks_missing": "fewer ranks report than the deployment has",
    "ttft_is_whole_answer": "its first-token times are of whole answers",
    "ttft_without_queue": "its first-token times leave out the queue",
    "stuck_in_one_bucket": "all its first-token times are in one outermost bucket",
    "implausible_latency": "first tokens come faster than any engine can",
    "malformed_lines": "lines of its page can't be read",
    "duplicate_series": "its page has a series twice",
    "mixed_buckets": "its bucket bounds differ from other targets'",
    "kv_events_unknown": "no KV events arrive",
    "kv_events_missed": "KV events were lost for good",
    "index_gap": "it may hold blocks that nobody saw stored",
    "stale_index": "KV events are late or cut off",
    "cached_exceeds_prompt": "records have more cached tokens than prompt",
    "ttft_near_e2e": "records have first tokens as late as the last",
    "bad_records": "records have figures below 0",
    "several_routers": "several routers answer at its address: give each its own target",
    "shared_workers": "another router sends to its workers too",
}


def flag_words(flag: str) -> str:
    """What the flag means; a flag without words shows by its name."""
    return FLAG_WORDS.get(flag, flag.replace("_", " "))
