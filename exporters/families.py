"""Every metric family that the exporter can write: its name, kind, labels and meaning, in one table.

Rules, alerts, dashboards and runbooks may use these names and no others; tests hold them to it. A family
without a sample is left out of the page: unknown is absent, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

NAMESPACE = "prefixwatch_"

MIN_OBSERVATIONS = 20
"""Fewer observations than this prove nothing about a distribution."""


@dataclass(frozen=True, slots=True)
class Family:
    """One family; `name` is without the namespace, and a counter's without `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "summary", "unknown"]
    """`summary` for quantiles: no other kind may have that label; `unknown` for those that can be negative."""
    help: str
    labels: tuple[str, ...] = ()
    group: str = ""
    """The part of the exporter that writes it."""

    @property
    def full_name(self) -> str:
        """As PromQL has it: a counter's with `_total`; a histogram's without its three suffixes."""
        return f"{NAMESPACE}{self.name}{'_total' if self.kind == 'counter' else ''}"


def _table() -> list[Family]:
    return [
        *_group("prefix tokens", _PREFIX_TOKENS),
        *_group("requests", _REQUESTS),
        *_group("isolation", _ISOLATION),
        *_group("sessions", _SESSIONS),
        *_group("cold prefill", _COLD_PREFILL),
        *_group("router", _ROUTER),
        *_group("hotspot", _HOTSPOT),
        *_group("kv blocks", _KV_BLOCKS),
        *_group("prefix tree", _PREFIX_TREE),
        *_group("transfer", _TRANSFER),
        *_group("coupled optimisations", _COUPLED),
        *_group("engine", _ENGINE),
        *_group("probes", _PROBES),
        *_group("spans", _SPANS),
        *_group("exporter", _EXPORTER),
    ]


_Row = tuple[str, str, str, tuple[str, ...]]


def _group(group: str, rows: tuple[_Row, ...]) -> list[Family]:
    return [Family(name, kind, text, labels, group) for kind, name, text, labels in rows]  # type: ignore[arg-type]


_PREFIX_TOKENS: tuple[_Row, ...] = (
    ("counter", "prefix_hit_tokens", "Prompt tokens taken from a prefix cache, by the tier that held them.",
     ("target", "model", "tier")),
    ("counter", "prefix_query_tokens", "Prompt tokens looked up in the prefix cache.", ("target", "model")),
    ("gauge", "prefix_hit_ratio",
     "Share of the window's prompt tokens that were reused: from tokens really computed where an engine tells "
     "(source=computed), else hits over queries (source=cache).", ("target", "source")),
    ("gauge", "prefix_cache_hit_ratio", "Hits over queries in the window, as the engine's counters say.", ("target",)),
    ("gauge", "fleet_prefix_hit_ratio", "Hit tokens over queried tokens of all engines, in the window.", ()),
    ("gauge", "effective_cache_value_tokens",
     "Cached tokens times the window's hit ratio: low is safe to drain, high is worth keeping.", ("target",)),
    ("gauge", "locality_ratio",
     "How much of the traffic's reuse lies close: temporal, spatial, identity, topological, each 0 to 1.",
     ("dimension",)),
    ("counter", "prefix_funnel_tokens",
     "Prompt tokens that some worker held, that the chosen worker held, and that were delivered as cached.",
     ("stage",)),
)  # fmt: skip

_REQUESTS: tuple[_Row, ...] = (
    ("histogram", "request_hit_tokens", "Cached prompt tokens of a request, as its engine reports them.", ()),
    ("histogram", "ttft_seconds", "Time to first token by how much of the prompt was cached.", ("cache",)),
    ("histogram", "ttft_by_length_seconds", "Time to first token by cache class and prompt length in tokens.",
     ("cache", "length")),
    ("histogram", "tpot_seconds", "Time per output token after the first, by request class.", ("class",)),
    ("histogram", "e2e_seconds", "From a request's arrival to the end of its answer, by request class.", ("class",)),
    ("counter", "requests", "Requests by class and outcome.", ("class", "outcome")),
    ("counter", "goodput_requests", "Requests that met every objective of their class.", ("class",)),
    ("counter", "goodput_tokens", "Output tokens of requests that met every objective of their class.", ("class",)),
    ("counter", "slo_requests", "Requests that an objective was judged on, by verdict: good or bad.",
     ("slo", "verdict")),
    ("counter", "tenant_requests", "Requests by tenant and outcome.", ("tenant", "outcome")),
    ("counter", "tenant_prompt_tokens", "Prompt tokens by tenant.", ("tenant",)),
    ("counter", "tenant_hit_tokens", "Cached prompt tokens by tenant.", ("tenant",)),
    ("histogram", "tenant_ttft_seconds", "Time to first token by tenant and cache class.", ("tenant", "cache")),
    ("unknown", "ttft_miss_minus_hit_seconds",
     f"TTFT quantile of misses minus that of hits, in the window; at least {MIN_OBSERVATIONS} of each.",
     ("quantile",)),
    ("gauge", "ttft_window_requests", "First tokens in the window that the delta is taken from.", ("cache",)),
    ("counter", "request_records", "Request records read, by where they came from: router, spans, probes.",
     ("source",)),
    ("counter", "request_records_missed", "Request records that were gone before they could be read.", ("source",)),
)  # fmt: skip

_ISOLATION: tuple[_Row, ...] = (
    ("counter", "isolation_violations",
     "Requests that reused, or seem to have reused, another tenant's cache, by kind: cross_tenant_hit, "
     "unsalted_traffic, fast_cold_prompt.", ("kind",)),
    ("counter", "isolation_audited_requests",
     "Requests for which it is known what their tenant had sent before.", ()),
    ("gauge", "isolation_cached_tokens", "Tokens in the prefix cache of a target whose KV events tell salts.",
     ("target",)),
    ("gauge", "isolation_duplicate_tokens",
     "Cached tokens that the target also holds under another salt; of ten tenants' copies nine count.", ("target",)),
    ("counter", "isolation_lost_hit_tokens",
     "Tokens stored while the target held the same ones under another salt: prefix hits that salts cost.",
     ("target",)),
)  # fmt: skip

_SESSIONS: tuple[_Row, ...] = (
    ("counter", "session_prompt_tokens", "Prompt tokens of requests after a session's first.", ()),
    ("counter", "session_hit_tokens", "Cached prompt tokens of requests after a session's first.", ()),
    ("gauge", "sessions", "Sessions seen in the window.", ()),
    ("counter", "sticky_requests",
     "Completed requests with a sticky key already seen, where it is known who held their prompt.", ()),
    ("counter", "sticky_collisions",
     "Of sticky requests, those sent to another worker though the last one was up and held more of the prompt.", ()),
    ("counter", "session_migrations", "Requests whose session was last served by another worker, or another node.",
     ("scope",)),
    ("gauge", "warm_pool_utilization_ratio",
     "KV cache in use at the workers that serve hits, weighted by their hit tokens in the window.", ()),
)  # fmt: skip

_COLD_PREFILL: tuple[_Row, ...] = (
    ("histogram", "cold_prefill_seconds", "Time to first token of requests that found nothing cached.", ()),
    ("histogram", "warm_prefill_seconds", "Time to first token of requests whose whole prompt was cached.", ()),
    ("counter", "cold_prefill_requests", "Requests that found nothing cached.", ()),
    ("counter", "cold_prefill_gpu_seconds", "GPU time of the prefills that found nothing cached.", ()),
    ("counter", "cold_prefill_cost_usd", "The same GPU time at the configured price.", ()),
    ("histogram", "prefill_wait_seconds", "Time that requests waited for their prefill to begin.", ()),
    ("histogram", "prefix_miss_cost_ratio",
     "TTFT of a miss over the cold-prefill baseline of its prompt length.", ()),
    ("gauge", "cold_prefill_baseline_seconds", "Prefill time of a cold prompt of this many tokens on an idle worker.",
     ("length",)),
    ("counter", "prefill_saved_gpu_seconds", "GPU time that cached tokens spared, at the baseline's cost a token.", ()),
    ("counter", "prefill_saved_usd", "The same GPU time at the configured price.", ()),
)  # fmt: skip

_ROUTER: tuple[_Row, ...] = (
    ("histogram", "router_decision_seconds", "Time a router takes to place a request, by step.", ("step",)),
    ("counter", "router_decisions", "Placements by the router's policy and the policy's reason.",
     ("policy", "reason")),
    ("counter", "topology_placements", "Placements by whether they stayed in the zone that held the prefix.",
     ("result",)),
    ("gauge", "router_in_flight_requests", "Requests in flight by the router's own count.", ("worker",)),
    ("gauge", "router_believed_blocks", "KV blocks that routers believe to be at a worker.", ("worker",)),
    ("gauge", "router_oldest_in_flight_seconds", "Age of the oldest request that the router has in flight.",
     ("target",)),
    ("counter", "router_untokenized_requests", "Requests whose tokens the router wanted and couldn't know.",
     ("target",)),
    ("gauge", "in_flight_leak_requests",
     "Requests the router counts in flight at a worker beyond those the engine knows, least of the window.",
     ("worker",)),
    ("counter", "predicted_hit_tokens", "Cached tokens that the router expected, where it looked.", ()),
    ("counter", "delivered_hit_tokens", "Cached tokens that engines delivered on the same requests.", ()),
)  # fmt: skip

_HOTSPOT: tuple[_Row, ...] = (
    ("gauge", "hotspot_overloaded_ratio", "Share of workers with more than 1.5 times the fleet's mean load.", ()),
    ("gauge", "hotspot_max_over_mean", "The busiest worker's load over the fleet's mean load.", ()),
    ("gauge", "hotspot_busiest_over_least", "The busiest worker's load over the least busy one's.", ()),
    ("gauge", "hotspot_top_share_ratio", "The busiest worker's share of the window's requests.", ()),
    ("gauge", "worker_load_requests", "Requests running and waiting, mean of the window's samples.", ("worker",)),
)  # fmt: skip

_KV_BLOCKS: tuple[_Row, ...] = (
    ("counter", "kv_blocks_evicted", "KV blocks evicted, counted from KV events.", ("target",)),
    ("counter", "kv_blocks_regretted", "KV blocks that were stored again within 5 minutes of their eviction.",
     ("target",)),
    ("counter", "kv_blocks_stored", "KV blocks stored, counted from KV events.", ("target",)),
    ("gauge", "kv_blocks_resident", "KV blocks in the prefix cache, by KV events.", ("target",)),
    ("histogram", "kv_block_lifetime_seconds", "From a KV block's storing to its eviction, by KV events.",
     ("target",)),
    ("gauge", "kv_events_lag_seconds", "From the engine's clock at the last event batch to its arrival.", ("target",)),
    ("counter", "kv_event_batches", "KV-event batches applied.", ("target",)),
    ("counter", "kv_event_batches_missed", "KV-event batches that never came, nor could be replayed.", ("target",)),
    ("counter", "kv_event_batches_replayed", "KV-event batches that were asked for again and came.", ("target",)),
    ("counter", "kv_cache_clears", "Times that a target's whole prefix cache was dropped, or lost from sight.",
     ("target",)),
)  # fmt: skip

_PREFIX_TREE: tuple[_Row, ...] = (
    ("gauge", "prefix_tree_blocks", "Distinct KV blocks cached anywhere, by KV events.", ()),
    ("gauge", "prefix_tree_height_levels", "Branch points on the longest path of the prefix tree.", ()),
    ("summary", "prefix_tree_depth_levels", "Branch points above a leaf of the prefix tree, by quantile of the leaves.",
     ("quantile",)),
    ("summary", "prefix_tree_fan_out", "Children of a branch point of the prefix tree, by quantile.", ("quantile",)),
    ("summary", "prefix_block_replicas", "Workers that hold a KV block, by quantile of the distinct blocks.",
     ("quantile",)),
    ("gauge", "prefix_hot_branch_tokens", "Cached tokens below one of the hottest branches.", ("prefix",)),
)  # fmt: skip

_TRANSFER: tuple[_Row, ...] = (
    ("histogram", "kv_transfer_seconds", "Time that moving KV blocks took.", ("source", "destination")),
    ("counter", "kv_transfer_bytes", "KV bytes moved.", ("source", "destination")),
    ("counter", "kv_transfer_failures", "KV transfers that failed.", ("source", "destination")),
    ("gauge", "kv_transfer_break_even_tokens",
     "Prefix length from which moving the KV blocks is quicker than computing them.", ("source", "destination")),
)  # fmt: skip

_COUPLED: tuple[_Row, ...] = (
    ("counter", "speculative_draft_tokens", "Tokens that speculative decoding proposed.", ("target", "model")),
    ("counter", "speculative_accepted_tokens", "Proposed tokens that were accepted.", ("target", "model")),
    ("gauge", "moe_expert_alignment_ratio", "Balance of the experts' load, mean over the busiest, 0 to 1.",
     ("target",)),
    ("counter", "affinity_admissions",
     "Requests whose prefix some worker held, by where they were admitted: held (there) or elsewhere.", ("result",)),
    ("counter", "preemptions", "Requests pushed out of an engine's batch to be computed again.", ("target", "model")),
)  # fmt: skip

_ENGINE: tuple[_Row, ...] = (
    ("gauge", "requests_running", "Requests in the engine's batch.", ("target",)),
    ("gauge", "requests_waiting", "Requests queued in the target.", ("target",)),
    ("gauge", "kv_usage_ratio", "KV cache in use, 0 to 1, the fullest engine; sampled at the scrape.", ("target",)),
    ("gauge", "kv_usage_mean_ratio", "KV cache in use, 0 to 1, mean of the target's engines.", ("target",)),
    ("gauge", "kv_capacity_blocks", "KV blocks that the target can hold.", ("target",)),
    ("counter", "kv_store_query_tokens",
     "Prompt tokens that a KV store was asked for after the engine's own cache missed them.", ("target", "model")),
    ("counter", "kv_store_hit_tokens",
     "Of these the ones it held, by its tier. Engines count the same tokens as hits of a tier that isn't theirs.",
     ("target", "model", "tier")),
    ("counter", "kv_store_query_objects", "Objects of the store's own size that it was asked for.", ("target",)),
    ("counter", "kv_store_hit_objects", "Of these the ones it held.", ("target",)),
    ("counter", "kv_evicted_tokens", "Tokens evicted from KV caches, as the target itself counts them.", ("target",)),
    ("counter", "kv_evicted_objects", "KV objects or chunks evicted, of the store's own size, as it counts them.",
     ("target",)),
    ("histogram", "kv_block_idle_before_evict_seconds",
     "From a KV block's last use to its eviction, as the target itself samples it.", ("target",)),
    ("gauge", "gpu_utilization_ratio", "Share of time in which anything ran on the GPU.", ("target", "gpu")),
    ("gauge", "gpu_tensor_active_ratio", "Share of cycles in which the GPU's tensor cores worked.", ("target", "gpu")),
    ("gauge", "gpu_power_watts", "Power that the GPU draws.", ("target", "gpu")),
    ("counter", "gpu_energy_joules", "Energy that the GPU has used.", ("target", "gpu")),
    ("summary", "engine_latency_quantile_seconds",
     "Quantiles of the latencies that the target itself times, in the window.", ("target", "latency", "quantile")),
)  # fmt: skip

_PROBES: tuple[_Row, ...] = (
    ("histogram", "probe_ttft_seconds", "Time to first token of a probe's prompt when it is cold, and of its repeat.",
     ("target", "temperature")),
    ("counter", "probe_requests",
     "Probe requests by outcome; skipped are rounds not sent, as requests waited or the budget was spent.",
     ("target", "outcome")),
    ("gauge", "probe_cached_tokens", "Cached tokens reported for the last probe's prompt and its repeat.",
     ("target", "temperature")),
    ("gauge", "probe_prompt_tokens", "Prompt tokens reported for the last probe.", ("target",)),
    ("counter", "probe_canaries",
     "Prompts of one tenant that were sent again as another, by result: miss (kept apart) or hit (a leak).",
     ("target", "result")),
    ("gauge", "probe_finding",
     "1 when the newest probes of a target found this, 0 when they looked and didn't: caching_off, "
     "cached_tokens_unreported, repeat_not_faster, cold_prompt_hit, cross_tenant_hit.", ("target", "finding")),
)  # fmt: skip

_SPANS: tuple[_Row, ...] = (
    ("counter", "otlp_exports", "Trace exports received, by the HTTP status of the answer.", ("code",)),
    ("counter", "spans",
     "Spans received, by what became of them: used (a request), merged (into another span's request), other (no "
     "call of a model), duplicate, late, elsewhere (the router's own records tell it), refused.", ("result",)),
    ("counter", "span_faults", "Spans refused and values of spans dropped, by what was wrong.", ("fault",)),
)  # fmt: skip

_EXPORTER: tuple[_Row, ...] = (
    ("gauge", "data_quality",
     "1 when this flag warns that the target's numbers may mislead, 0 when it was checked.", ("target", "flag")),
    ("gauge", "missing_signal", "1 for a signal that the target's newest page lacks under all of its known names.",
     ("target", "signal")),
    ("gauge", "target_up", "1 when the last scrape brought metrics of a known system.",
     ("target", "system", "version")),
    ("gauge", "window_ready", "1 when rates and ratios over the window are known.", ("target",)),
    ("gauge", "window_seconds", "How long the target's window is now.", ("target",)),
    ("counter", "scrapes", "Scrapes that ended, well or not.", ("target",)),
    ("counter", "scrape_failures", "Scrapes that failed, by reason.", ("target", "reason")),
    ("gauge", "scrape_duration_seconds", "How long the last scrape took.", ("target",)),
    ("gauge", "scrape_body_bytes", "Size of the last metrics page.", ("target",)),
    ("gauge", "scrape_samples", "Samples taken from the last metrics page.", ("target",)),
    ("gauge", "scrape_age_seconds", "Time since the last good scrape.", ("target",)),
    ("gauge", "discovered_targets", "Targets by the discovery that found them.", ("discovery",)),
    ("counter", "discovery_failures", "Refreshes of a discovery that failed.", ("discovery",)),
    ("gauge", "config_last_reload_successful", "1 when the last reload of the configuration was taken.", ()),
)  # fmt: skip


FAMILIES: Mapping[str, Family] = {family.name: family for family in _table()}


def counter(name: str) -> CounterMetricFamily:
    """An empty family of this name to add metrics to. Raises KeyError for a name that isn't in the table."""
    family = FAMILIES[name]
    return CounterMetricFamily(NAMESPACE + name, family.help, labels=family.labels)


def gauge(name: str) -> GaugeMetricFamily:
    """As `counter`."""
    family = FAMILIES[name]
    return GaugeMetricFamily(NAMESPACE + name, family.help, labels=family.labels)


def histogram(name: str) -> HistogramMetricFamily:
    """As `counter`."""
    family = FAMILIES[name]
    return HistogramMetricFamily(NAMESPACE + name, family.help, labels=family.labels)


class QuantileFamily(Metric):
    """Quantiles of one or several distributions, without the count and the sum that a summary may have besides."""

    def __init__(self, family: Family) -> None:
        super().__init__(NAMESPACE + family.name, family.help, family.kind)
        self._labels = family.labels

    def add_metric(self, labels: Sequence[str], value: float) -> None:
        """One quantile, by the family's labels in their order."""
        self.add_sample(self.name, dict(zip(self._labels, labels, strict=True)), value)


def quantiles(name: str) -> QuantileFamily:
    """As `counter`."""
    return QuantileFamily(FAMILIES[name])
