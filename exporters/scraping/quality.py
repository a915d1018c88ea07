"""Why a target's numbers may mislead: flags that alerts and runbooks can read.

A flag is 1 (raised), 0 (looked at, fine) or absent (couldn't be looked at).
"""

from __future__ import annotations

from exporters.families import MIN_OBSERVATIONS
from exporters.scraping.histogram import Histogram, merge
from exporters.scraping.signals import SignalStore

PLAUSIBLE_TTFT_SECONDS = 1e-4
"""No engine answers a prompt faster on average: a lower mean is a broken clock (vllm#6337, vllm#8115)."""

MISSING_OBSERVATIONS_RATIO = 0.01
SKIPPED_LOOKUP_RATIO = 0.01
UNDER_WAY_RATIO = 0.1
INFLATED_RATIO = 0.01

DOUBLE_COUNTED_FACTOR = 1.1
"""Lookups beyond the prompts by more than what is booked on two sides of a window's edge."""

LAST_RANK_FACTOR = 1.5
"""A throughput gauge that the counter exceeds this many times is of one rank out of several (sglang#6892)."""

WHOLE_ANSWER_RATIO = 0.98
WHOLE_ANSWER_TOKENS = 32
"""A first token can't come with 98 % of an answer of more than 32 tokens gone (aibrix#2477)."""


def flags(store: SignalStore) -> dict[str, bool]:
    """All flags that can be told from this target's own numbers."""
    found = {
        "missing_family": bool(missing_signals(store)),
        "frozen_engine": None if store.system.frozen_after_seconds is None else bool(store.frozen),
        "counter_reset": store.resets > 0 and store.increase is None,
        "preemption_inflated": preemption_inflated(store),
        "lookup_skipped": lookup_skipped(store),
        "missing_observations": missing_observations(store),
        "prefix_caching_off": prefix_caching_off(store),
        "dead_hit_counter": dead_hit_counter(store),
        "double_counted": double_counted(store),
        "impossible_ratio": impossible_ratio(store),
        "last_rank_only": last_rank_only(store),
        "ttft_is_whole_answer": ttft_is_whole_answer(store),
        "ttft_without_queue": ttft_without_queue(store),
        **_ttft_flags(store),
    }
    return {name: raised for name, raised in found.items() if raised is not None}


def missing_signals(store: SignalStore) -> list[str]:
    """Required signals of the system that the newest text doesn't have, under any of their names."""
    return [name for name, signal in store.system.signals.items() if signal.required and not store.on_newest_page(name)]


def preemption_inflated(store: SignalStore) -> bool | None:
    """Requests were preempted, and the tokens they recomputed from cache are booked as prefix hits.

    Where the tokens really computed are known the flag is raised only when the two ratios really differ.
    """
    preemptions = store.grown("preemptions")
    raw = raw_hit_ratio(store)
    if preemptions is None or raw is None:
        return None
    computed = computed_hit_ratio(store)
    return preemptions > 0 and (computed is None or raw - computed > INFLATED_RATIO)


def lookup_skipped(store: SignalStore) -> bool | None:
    """Prompts were processed that never looked into the cache, and so are missing from its counters.

    Told from the prompts; or, where none are counted, from an external cache that was asked while the own one wasn't.
    A lookup is booked before its prompt is, so prompts that were under way when the window began are no skipped ones.
    """
    prompts, queries = store.grown("prompt_tokens"), store.grown("prefix_query_tokens")
    external = store.grown("external_query_tokens")
    if queries is None or not (prompts or external):
        return None
    if not prompts:
        return queries == 0
    ever_queried, ever_prompted = store.total("prefix_query_tokens") or 0.0, store.total("prompt_tokens") or 0.0
    under_way = max((ever_queried - queries) - (ever_prompted - prompts), 0.0)
    if queries:  # what is under way for ever are aborted prompts: with lookups to compare, it explains only so much
        under_way = min(under_way, prompts * UNDER_WAY_RATIO)
    return prompts - queries > max(prompts * SKIPPED_LOOKUP_RATIO, under_way)


def double_counted(store: SignalStore) -> bool | None:
    """The external cache was asked for more tokens than prompts have: some lookups were booked twice."""
    prompts, external = store.grown("prompt_tokens"), store.grown("external_query_tokens")
    return None if not prompts or external is None else external > prompts * DOUBLE_COUNTED_FACTOR


def impossible_ratio(store: SignalStore) -> bool | None:
    """More hits than lookups: a label or a counter is wrong, and the ratio is left out rather than cut to 1.

    Told from lifetime sums: a request's lookup and its hits may be booked on two sides of a window's edge.
    """
    hits, queries = store.total("prefix_hit_tokens"), store.total("prefix_query_tokens")
    return None if hits is None or not queries else hits > queries


def last_rank_only(store: SignalStore) -> bool | None:
    """The throughput gauge is far below what the counter grew by: it is of the rank that reported last."""
    gauges, grown = store.gauges_of("generation_tokens_per_second"), store.grown("generation_tokens")
    if not gauges or not grown or store.increase is None:
        return None
    shown = sum(gauges.values())
    return None if shown <= 0 else grown / store.increase.seconds > LAST_RANK_FACTOR * shown


def ttft_is_whole_answer(store: SignalStore) -> bool | None:
    """First tokens come when answers end, though answers have many: the last chunk was taken for the first."""
    ttft, whole = _merged(store.histograms("ttft_seconds")), _merged(store.histograms("e2e_seconds"))
    tokens, finished = store.total("generation_tokens"), store.total("finished_requests")
    if ttft is None or whole is None or not finished or finished < MIN_OBSERVATIONS or tokens is None:
        return None
    first, last = ttft.mean(), whole.mean()
    if first is None or not last or tokens / finished <= WHOLE_ANSWER_TOKENS:
        return None
    return first / last > WHOLE_ANSWER_RATIO


def ttft_without_queue(store: SignalStore) -> bool | None:
    """Requests wait longer than they take to their first token: this TTFT begins after the wait.

    llm-d/llm-d-inference-sim#266.
    """
    ttft, queue = _merged(store.histograms("ttft_seconds")), _merged(store.histograms("queue_seconds"))
    if ttft is None or queue is None or min(ttft.count, queue.count) < MIN_OBSERVATIONS:
        return None
    first, waited = ttft.mean(), queue.mean()
    return None if first is None or waited is None else waited > first


def ranks_seen(store: SignalStore) -> int:
    """GPU processes that report transfers on this page."""
    return len({rank for (rank,) in store.totals_by("kv_transfer_bytes", "rank") if rank})


def missing_observations(store: SignalStore) -> bool | None:
    """Fewer first tokens were observed than requests finished: the TTFT histogram isn't of all requests."""
    observed, finished = store.total("ttft_seconds", "count"), store.total("finished_requests")
    if observed is None or not finished or finished < MIN_OBSERVATIONS:
        return None
    return finished - observed > finished * MISSING_OBSERVATIONS_RATIO


def prefix_caching_off(store: SignalStore) -> bool | None:
    """The engine says that it runs without a prefix cache."""
    settings = [info.get("enable_prefix_caching") for info in store.infos.get("cache_config", ())]
    return None if not settings else "False" in settings


def dead_hit_counter(store: SignalStore) -> bool | None:
    """Lookups hit, but the system's other counter, of tokens then retrieved, never moved: don't plot that one."""
    hits, retrieved = store.total("prefix_hit_tokens"), store.total("retrieved_tokens")
    return None if not hits or retrieved is None else retrieved == 0


def _ttft_flags(store: SignalStore) -> dict[str, bool | None]:
    """Of the window when it has enough observations, else of the engine's whole life."""
    histogram = _merged(store.grown_histograms("ttft_seconds"))
    if histogram is None or histogram.count < MIN_OBSERVATIONS:
        histogram = _merged(store.histograms("ttft_seconds"))
    if histogram is None or histogram.count < MIN_OBSERVATIONS:
        return {}
    mean = histogram.mean()
    only = histogram.only_bucket()
    return {
        "stuck_in_one_bucket": only is not None and only in (histogram.bounds[0], histogram.bounds[-1]),
        "implausible_latency": None if mean is None else mean < PLAUSIBLE_TTFT_SECONDS,
    }


def raw_hit_ratio(store: SignalStore) -> float | None:
    """Hit tokens over queried tokens in the window, as the engine's cache counters have it; at most 1.

    None when the counters contradict each other.
    """
    hits, queries = store.grown("prefix_hit_tokens"), store.grown("prefix_query_tokens")
    if hits is None or not queries or impossible_ratio(store):
        return None
    return min(hits / queries, 1.0)


def computed_hit_ratio(store: SignalStore) -> float | None:
    """1 - tokens really computed / prompt tokens, over the requests that finished in the window; at least 0."""
    computed, prompts = store.grown("finished_computed_tokens"), store.grown("finished_prompt_tokens")
    return max(1 - computed / prompts, 0.0) if computed is not None and prompts else None


def _merged(histograms: dict[str, list[Histogram]]) -> Histogram | None:
    merged = merge(one for group in histograms.values() for one in group)
    return merged.histogram if merged else None
