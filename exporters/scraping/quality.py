"""Why a target's numbers may mislead: flags that alerts and runbooks can read.

A flag is 1 (raised), 0 (looked at, fine) or absent (couldn't be looked at).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TypeVar

from prefixwatch.exporters.metrics_page.families import MIN_OBSERVATIONS
from prefixwatch.exporters.scraping.signals import SignalStore

_T = TypeVar("_T")

PLAUSIBLE_TTFT_SECONDS = 1e-4
"""No engine is faster than this on average: a lower mean is a broken clock (vllm#6337, vllm#8115)."""

MISSING_OBSERVATIONS_RATIO = 0.01
SKIPPED_LOOKUP_RATIO = 0.01
UNDER_WAY_RATIO = 0.1
INFLATED_RATIO = 0.01

DOUBLE_COUNTED_FACTOR = 1.1
"""Lookups beyond the prompts by more than what is booked on two sides of a window's edge."""

TRANSFERRED_RATIO = 0.98
MIN_TRANSFERRED_TOKENS = 10_000
"""Prompt tokens from which on such a share can't be a cache's luck."""

LAST_RANK_FACTOR = 1.5
"""A throughput gauge that the counter exceeds this many times is of one rank out of several (sglang#6892)."""

WHOLE_ANSWER_RATIO = 0.98
WHOLE_ANSWER_TOKENS = 32
"""A first token can't come with 98 % of an answer of more than 32 tokens gone (aibrix#2477)."""


def _once(work_out: Callable[[SignalStore], _T]) -> Callable[[SignalStore], _T]:
    """Work it out once a reading: several flags and figures rest on the same answers."""

    @wraps(work_out)
    def found(store: SignalStore) -> _T:
        if work_out not in store.known:
            store.known[work_out] = work_out(store)
        answer: _T = store.known[work_out]
        return answer

    return found


def flags(store: SignalStore) -> dict[str, bool]:
    """All flags that follow from this target's own numbers."""
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
        "hits_by_transfer": hits_by_transfer(store),
        "impossible_ratio": impossible_ratio(store),
        "last_rank_only": last_rank_only(store),
        "ttft_is_whole_answer": ttft_is_whole_answer(store),
        "ttft_without_queue": ttft_without_queue(store),
        **_ttft_flags(store),
    }
    return {name: raised for name, raised in found.items() if raised is not None}


@_once
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

    From the prompts; or, where none are counted, from an external cache that was asked while the own one wasn't.
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
    if queries:  # what is under way forever are aborted prompts: with lookups to compare, it explains only so much
        under_way = min(under_way, prompts * UNDER_WAY_RATIO)
    return prompts - queries > max(prompts * SKIPPED_LOOKUP_RATIO, under_way)


def double_counted(store: SignalStore) -> bool | None:
    """Lookups were booked more than once: more tokens were looked up than prompts have, in the own or in an external
    cache."""
    prompts, external = store.grown("prompt_tokens"), store.grown("external_query_tokens")
    repeated = repeated_lookups(store)
    if not prompts or (external is None and repeated is None):
        return None
    return bool(repeated) or (external is not None and external > prompts * DOUBLE_COUNTED_FACTOR)


@_once
def repeated_lookups(store: SignalStore) -> bool | None:
    """The engine's own cache was asked for more tokens than prompts have, and than requests under way explain.

    A request that waits for memory may look its prompt up again in each step. vllm-project/vllm#43736.
    """
    prompts, queries = store.grown("prompt_tokens"), store.grown("prefix_query_tokens")
    ever, finished = store.total("prompt_tokens"), store.total("finished_requests")
    if not prompts or queries is None or not ever or not finished:
        return None
    under_way = sum(sum(store.gauges_of(name).values()) for name in ("running_requests", "waiting_requests"))
    return queries - prompts > max(prompts * (DOUBLE_COUNTED_FACTOR - 1), under_way * ever / finished)


@_once
def hits_by_transfer(store: SignalStore) -> bool | None:
    """What looks like hits of a remote cache is KV that a prefill engine computed and handed over: work that was done
    for this very request, and no reuse.

    By the engine's role; or because nearly every prompt token comes through the connector, as no cache could have it.
    vllm-project/vllm#33289.
    """
    hits, queries = store.total("external_hit_tokens"), store.total("external_query_tokens")
    prompts = store.total("prompt_tokens")
    if hits is None or not queries or not prompts:
        return None
    if "decode" in (store.place.get("role"), store.identity.get("role")):
        return True
    enough = prompts >= MIN_TRANSFERRED_TOKENS
    return enough and hits >= TRANSFERRED_RATIO * queries and queries >= TRANSFERRED_RATIO * prompts


@_once
def reuse(store: SignalStore) -> tuple[float, float, str] | None:
    """Reused prompt tokens and prompt tokens of the window, and where they are from: `computed` (from the tokens that
    were computed, or booked as cached once a prompt) or `cache` (hits and lookups). None where neither can be trusted.
    """
    if hits_by_transfer(store):
        return None
    computed, finished = store.grown("finished_computed_tokens"), store.grown("finished_prompt_tokens")
    if computed is not None and finished:
        return max(finished - computed, 0.0), finished, "computed"
    cached, prompts = store.grown("prompt_tokens_cached"), store.grown("prompt_tokens")
    if cached is not None and prompts:
        return min(cached, prompts), prompts, "computed"
    hits, queries = store.grown("prefix_hit_tokens"), store.grown("prefix_query_tokens")
    if hits is None or not queries or impossible_ratio(store) or repeated_lookups(store):
        return None
    return min(hits, queries), queries, "cache"


def contradictions(store: SignalStore, raised: Mapping[str, bool]) -> dict[str, str]:
    """For flags that hold two sources against each other: both values, by flag. Only those that are raised."""
    return {flag: values(store) for flag, values in _BOTH_VALUES.items() if raised.get(flag)}


def _number(value: float | None) -> str:
    return f"{value or 0.0:,.0f}"


_BOTH_VALUES: Mapping[str, Callable[[SignalStore], str]] = {
    "double_counted": lambda store: (
        f"{_number(max(store.grown(name) or 0.0 for name in ('prefix_query_tokens', 'external_query_tokens')))} tokens "
        f"looked up, {_number(store.grown('prompt_tokens'))} prompt tokens"
    ),
    "hits_by_transfer": lambda store: (
        f"{_number(store.total('external_hit_tokens'))} of {_number(store.total('prompt_tokens'))} prompt tokens came "
        "through the KV connector"
    ),
    "impossible_ratio": lambda store: (
        f"{_number(store.total('prefix_hit_tokens'))} hit tokens, "
        f"{_number(store.total('prefix_query_tokens'))} looked up"
    ),
    "lookup_skipped": lambda store: (
        f"{_number(store.grown('prefix_query_tokens'))} tokens looked up, "
        f"{_number(store.grown('prompt_tokens'))} prompt tokens"
    ),
    "missing_observations": lambda store: (
        f"{_number(store.total('ttft_seconds', 'count'))} first tokens, "
        f"{_number(store.total('finished_requests'))} finished requests"
    ),
}


@_once
def impossible_ratio(store: SignalStore) -> bool | None:
    """More hits than lookups: a label or a counter is wrong, and the ratio is left out rather than cut to 1.

    From lifetime sums: a request's lookup and its hits may be booked on two sides of a window's edge.
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
    first, last = _mean(store, "ttft_seconds"), _mean(store, "e2e_seconds")
    tokens, finished = store.total("generation_tokens"), store.total("finished_requests")
    if not finished or finished < MIN_OBSERVATIONS or tokens is None:
        return None
    if first is None or not last or tokens / finished <= WHOLE_ANSWER_TOKENS:
        return None
    return first / last > WHOLE_ANSWER_RATIO


def ttft_without_queue(store: SignalStore) -> bool | None:
    """Requests wait longer than they take to their first token: this TTFT begins after the wait.

    llm-d/llm-d-inference-sim#266.
    """
    if min(store.total(name, "count") or 0.0 for name in ("ttft_seconds", "queue_seconds")) < MIN_OBSERVATIONS:
        return None
    first, waited = _mean(store, "ttft_seconds"), _mean(store, "queue_seconds")
    return None if first is None or waited is None else waited > first


def _mean(store: SignalStore, histogram: str) -> float | None:
    """Of all that was ever observed."""
    total, count = store.total(histogram, "sum"), store.total(histogram, "count")
    return total / count if total is not None and count else None


def ranks_seen(store: SignalStore) -> int:
    """GPU processes that report transfers on this page."""
    return len({rank for (rank,) in store.totals_by("kv_transfer_bytes", "rank") if rank})


def engines_seen(store: SignalStore | None) -> int:
    """Engines, or data-parallel ranks, that report requests or lookups on this page.

    Figures without an engine label are of one engine, or of all of them together: they add none.
    """
    if store is None:
        return 0
    gauges, counters = store.gauges_of("running_requests"), store.totals_by("prefix_query_tokens", "engine")
    named = {dict(each).get("engine", "") for each in gauges} | {engine for (engine,) in counters}
    return len(named - {""}) or min(1, len(named))


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
    histogram = store.merged("ttft_seconds", grown=True)
    if histogram is None or histogram.count < MIN_OBSERVATIONS:
        histogram = store.merged("ttft_seconds")
    if histogram is None or histogram.count < MIN_OBSERVATIONS:
        return {}
    mean = histogram.mean()
    only = histogram.only_bucket()
    return {
        "stuck_in_one_bucket": only is not None and only in (histogram.bounds[0], histogram.bounds[-1]),
        "implausible_latency": None if mean is None else mean < PLAUSIBLE_TTFT_SECONDS,
    }


@_once
def raw_hit_ratio(store: SignalStore) -> float | None:
    """Hit tokens over queried tokens in the window, as the engine's cache counters have it; at most 1.

    None when the counters contradict each other, or count KV that arrived by transfer.
    """
    hits, queries = store.grown("prefix_hit_tokens"), store.grown("prefix_query_tokens")
    if hits is None or not queries or impossible_ratio(store) or hits_by_transfer(store):
        return None
    return min(hits / queries, 1.0)


def computed_hit_ratio(store: SignalStore) -> float | None:
    """The window's reused share of prompt tokens, by tokens computed or booked once a prompt."""
    found = reuse(store)
    return found[0] / found[1] if found is not None and found[2] == "computed" else None
