"""Every metric family that the exporter can write: its name, kind, labels and meaning, in one table.

Rules, alerts, dashboards and runbooks may use these names and no others; tests hold them to it. A family
without a sample is left out of the page: unknown is absent, never 0.

`target` is the one label for a worker, an engine, a router or a cache, in every family: the name of a target. A worker
that only a router knows has the name that the router gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prefixwatch.exporters.metrics_page.own_families import OWN, Kind, Table

NAMESPACE = "prefixwatch_"

MIN_OBSERVATIONS = 20
"""Fewer observations than this prove nothing about a distribution."""

IDENTITY = ("model", "role", "pool", "namespace", "cluster")
"""Labels that say what a target is: the model it serves, `prefill` or `decode` where the two are split, and the pool,
namespace and cluster it belongs to. One that isn't known is left out, which is the same to Prometheus as empty."""

SERVED = ("model", "pool", "namespace", "cluster")
"""The first labels of every family about requests: what was served where. Those that aren't known are left out."""

_IDENTIFIED = frozenset({"target_up", "data_quality", "scrapes", "scrape_failures"})
"""Families about scrapes that rules join with what was scraped: both sides must name the same cluster."""


@dataclass(frozen=True, slots=True)
class Family:
    """One family; `name` is without the namespace, and a counter's without `_total`."""

    name: str
    kind: Kind
    """`summary` for quantiles: no other kind may have that label; `unknown` for those that can be negative."""
    help: str
    given: tuple[str, ...] = ()
    """The labels that the part that writes the family gives a value for."""
    group: str = ""
    """The part of the exporter that writes it."""

    @property
    def identified(self) -> bool:
        """Whether the page adds the identity of the target: to all families about targets, except how scrapes went."""
        return "target" in self.given and (self.group != "exporter" or self.name in _IDENTIFIED)

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels that its series can have."""
        return (*self.given, *(name for name in IDENTITY if name not in self.given)) if self.identified else self.given

    @property
    def full_name(self) -> str:
        """As in PromQL: a counter's with `_total`; a histogram's without its three suffixes."""
        return f"{NAMESPACE}{self.name}{'_total' if self.kind == 'counter' else ''}"


_T, _TM = ("target",), ("target", "model")

_TABLE: Table = {
    "prefix tokens": (
        ("counter", "prefix_hit_tokens", "Prompt tokens taken from a prefix cache, by tier.",
         ("target", "model", "tier")),
        ("counter", "prefix_query_tokens", "Prompt tokens looked up in the prefix cache.", _TM),
        ("counter", "prompt_tokens_transferred",
         "Prompt tokens whose KV was computed by another engine and handed over: not prefix hits.", _TM),
        ("gauge", "prefix_hit_ratio",
         "Share of prompt tokens that were reused in the window: from the tokens computed where the engine reports "
         "them (source=computed), otherwise hits over queries (source=cache).", ("target", "engine", "source")),
        ("gauge", "prefix_cache_hit_ratio",
         "Hit tokens over queried tokens in the window by the engine's counters, where prefix_hit_ratio "
         "differs from that by more than 0.01.", ("target", "engine")),
        ("gauge", "fleet_prefix_hit_ratio", "Hit tokens over queried tokens of all engines in the window.", ()),
        ("gauge", "effective_cache_value_tokens",
         "Cached tokens times the window's hit ratio: workers with low values are safe to drain.", _T),
        ("gauge", "locality_ratio",
         "How near reuse is, from 0 to 1, by dimension: temporal, spatial, identity, topological, and their norm.",
         ("dimension",)),
        ("counter", "prefix_funnel_tokens",
         "Prompt tokens held by any worker (held), held by the chosen worker (routed) and delivered as cached "
         "(delivered).", (*SERVED, "stage")),
    ),
    "requests": (
        ("histogram", "request_hit_tokens", "Cached prompt tokens of a request, as reported by its engine.", SERVED),
        ("histogram", "ttft_seconds",
         "Time to first token by cache class: all that could be reused was cached (hit), some (partial), none (miss).",
         (*SERVED, "cache")),
        ("histogram", "ttft_by_length_seconds", "Time to first token by cache class and prompt length in tokens.",
         (*SERVED, "cache", "length")),
        ("histogram", "tpot_seconds", "Time per output token after the first, by request class.", (*SERVED, "class")),
        ("histogram", "e2e_seconds", "Time from a request's arrival to the end of its response, by request class.",
         (*SERVED, "class")),
        ("counter", "requests", "Requests by class and outcome.", (*SERVED, "class", "outcome")),
        ("counter", "cache_class_requests",
         "Requests by cache class (hit, partial, miss) and basis: reusable (what the router's record says could have "
         "been reused) or whole_prompt.", (*SERVED, "cache", "basis")),
        ("counter", "goodput_requests", "Requests that met every objective of their class.", (*SERVED, "class")),
        ("gauge", "goodput_least_ratio",
         "Least share of the window's requests that met every objective, by the engines' own shares, which don't say "
         "of which requests they are (Fréchet's bounds).", ("model",)),
        ("gauge", "goodput_most_ratio", "The largest share that they allow.", ("model",)),
        ("counter", "goodput_tokens", "Output tokens of requests that met every objective of their class.",
         (*SERVED, "class")),
        ("counter", "slo_requests", "Requests judged by an objective, by verdict: good or bad.",
         (*SERVED, "slo", "verdict")),
        ("gauge", "cache_size_hit_ratio",
         "Share of the recent prompt tokens that an LRU cache of this multiple of today's size would have reused.",
         ("model", "size")),
        ("counter", "tenant_requests", "Requests by tenant and outcome.", (*SERVED, "tenant", "outcome")),
        ("counter", "tenant_prompt_tokens", "Prompt tokens by tenant.", (*SERVED, "tenant")),
        ("counter", "tenant_hit_tokens", "Cached prompt tokens by tenant.", (*SERVED, "tenant")),
        ("histogram", "tenant_ttft_seconds", "Time to first token by tenant and cache class.",
         (*SERVED, "tenant", "cache")),
        ("unknown", "ttft_miss_minus_hit_seconds",
         f"TTFT quantile of misses minus that of hits in the window; needs at least {MIN_OBSERVATIONS} of each.",
         (*SERVED, "quantile")),
        ("gauge", "ttft_window_requests", "First tokens in the window behind ttft_miss_minus_hit_seconds.",
         (*SERVED, "cache")),
        ("counter", "request_records", "Request records read, by source: router, spans, probes.", ("source",)),
        ("counter", "request_records_missed", "Request records dropped by the source before they were read.",
         ("source",)),
        ("counter", "unmeasured_requests",
         "Completed requests that lack what a figure needs: prompt_tokens, cached_tokens, output_tokens, ttft (not "
         "streamed), tpot, session (no key), goodput (neither TTFT nor TPOT).", (*SERVED, "figure")),
        ("counter", "label_overflow_requests",
         "Requests counted under `other` (or the default class) because a label had reached its limit of values.",
         ("label",)),
    ),
    "isolation": (
        ("counter", "isolation_violations",
         "Requests that reused, or appear to have reused, another tenant's cache, by kind: cross_tenant_hit, "
         "unsalted_traffic, fast_cold_prompt.", (*SERVED, "kind")),
        ("counter", "isolation_audited_requests", "Requests whose tenant's earlier prompts are known.", SERVED),
        ("counter", "isolation_not_audited_requests",
         "Completed requests that could not be audited, by reason: own_unknown, no_cached_tokens, or why a suspicious "
         "one is not certain.", (*SERVED, "reason")),
        ("gauge", "isolation_audited_ratio",
         "Audited share of the completed requests of the last 10 minutes; below 0.9 the audited requests and the "
         "absence of violations are not exported.", SERVED),
        ("counter", "isolation_findings",
         "Requests that show broken isolation, by kind: cross_tenant_hit, salt_ignored (by the engine), salt_reused, "
         "tenant_without_salt, salt_per_request, stored_unsalted and stored_salt_shared (by KV events), "
         "fast_cold_prompt; by certainty: certain (another tenant's cache was "
         "reused), unproven (or the tenant's own, through another router), configuration (the salts alone show it), "
         "statistical; and by the tier that served it: gpu, external (any other), unknown.",
         (*SERVED, "kind", "certainty", "tier")),
        ("gauge", "isolation_cached_tokens", "Cached tokens of targets whose KV events carry cache salts.", _T),
        ("gauge", "isolation_duplicate_tokens",
         "Cached tokens that the target also holds under another salt; with ten tenants' copies, nine are counted.",
         _T),
        ("counter", "isolation_lost_hit_tokens",
         "Tokens stored while the target held the same ones under another salt: prefix hits lost to isolation.", _T),
    ),
    "sessions": (
        ("counter", "session_prompt_tokens", "Prompt tokens of requests after a session's first.", SERVED),
        ("counter", "session_hit_tokens", "Cached prompt tokens of requests after a session's first.", SERVED),
        ("counter", "session_moved_prompt_tokens",
         "Of session_prompt_tokens those of requests whose session was last served by another worker.", SERVED),
        ("counter", "session_moved_hit_tokens", "The same of session_hit_tokens.", SERVED),
        ("gauge", "sessions", "Sessions seen in the window.", SERVED),
        ("counter", "sticky_requests",
         "Completed requests with a known sticky key and a known cache holder.", SERVED),
        ("counter", "sticky_collisions",
         "Sticky requests sent to another worker although the last one was up and held more of the prompt.", SERVED),
        ("counter", "session_moves",
         "Sessions moved on purpose that came back, by trigger (drain, death, overload, scale_in), kind (soft, hard) "
         "and what decided.", (*SERVED, "trigger", "kind", "why")),
        ("counter", "session_migrations", "Requests whose session was last served by another worker or node.",
         (*SERVED, "scope")),
        ("gauge", "workers_changed",
         "Workers that joined or left those that serve requests in the window, by change.", ("change",)),
        ("gauge", "sessions_moved_ratio",
         "Of the sessions with a later request in the window, those that changed worker in it.", ()),
    ),
    "cold prefill": (
        ("histogram", "cold_prefill_seconds", "Time to first token of requests with nothing cached.", SERVED),
        ("histogram", "warm_prefill_seconds", "Time to first token of requests with the whole prompt cached.", SERVED),
        ("counter", "cold_prefill_requests", "Requests with nothing cached.", SERVED),
        ("counter", "cold_prefill_gpu_seconds", "GPU time spent on prefills with nothing cached.", SERVED),
        ("counter", "cold_prefill_cost_usd", "Cost of cold_prefill_gpu_seconds at the configured price.", SERVED),
        ("histogram", "prefill_wait_seconds", "Time that requests waited for their prefill to start.", ()),
        ("histogram", "prefix_miss_cost_ratio", "TTFT of a miss over the cold-prefill baseline of its length.", SERVED),
        ("summary", "miss_cost_seconds",
         "Time to first token of the last 5 minutes' misses by part (prefill, queue, migrate, total) and prompt "
         "length; needs 5 of them.", (*SERVED, "part", "length", "quantile")),
        ("gauge", "cold_prefill_baseline_seconds",
         "Prefill time of a cold prompt of this many tokens on an idle worker.", ("model", "length")),
        ("counter", "prefill_saved_gpu_seconds", "GPU time saved by cached tokens, at the baseline's cost per token.",
         SERVED),
        ("counter", "prefill_saved_usd", "Value of prefill_saved_gpu_seconds at the configured price.", SERVED),
    ),
    "router": (
        ("histogram", "router_decision_seconds", "Time a router takes to place a request, by step.", ("step",)),
        ("counter", "router_decisions", "Placements by routing policy and reason.", (*SERVED, "policy", "reason")),
        ("counter", "topology_placements", "Placements by whether they stayed in the zone that held the prefix.",
         (*SERVED, "result")),
        ("gauge", "router_in_flight_requests", "Requests in flight at a worker, by the routers' own count.", _T),
        ("gauge", "router_believed_blocks", "KV blocks at a worker, by the routers' own index.", _T),
        ("gauge", "router_oldest_in_flight_seconds", "Age of the router's oldest request in flight.", _T),
        ("gauge", "router_identity_files_usable",
         "Whether the router could read this identity file the last time: secrets, jwks; 0: what it said before stays "
         "valid.", ("target", "file")),
        ("counter", "router_untokenized_requests", "Requests that the router could not tokenize.", _T),
        ("gauge", "in_flight_leak_requests",
         "Requests in flight by the router's count that the engine does not have, minimum over the window.", _T),
        ("counter", "predicted_hit_tokens", "Cached tokens predicted by the router, where it predicted.", SERVED),
        ("counter", "delivered_hit_tokens", "Cached tokens delivered by engines on the same requests.", SERVED),
        ("counter", "prompt_token_checks",
         "Completed requests whose prompt both router and engine counted, by result: equal or different.",
         (*SERVED, "result")),
        ("gauge", "router_block_size_tokens", "Tokens in a block of the router's index.", ()),
    ),
    "degradation": (
        ("gauge", "degradation_state",
         "1 for the state of the router's degradation chain that the request class is in: normal, or the latest step.",
         ("target", "class", "state")),
        ("counter", "degradation_state_seconds", "Time that the request class spent in the state.",
         ("target", "class", "state")),
        ("counter", "degradation_transitions",
         "Steps entered (by the rule pressure) and ended (by any other rule).", ("target", "class", "step", "rule")),
        ("gauge", "warm_pool_utilization_ratio",
         "Time to compute what waits at the workers reserved for misses, over the TTFT objective.", _T),
        ("histogram", "async_prefill_wait_seconds", "From a request to the end of its asynchronous prefill.", ()),
        ("counter", "async_prefills",
         "Asynchronous prefills by outcome: ready, failed, or full (too many pending: served as usual).",
         ("target", "outcome")),
    ),
    "scaling": (
        ("gauge", "scaling_desired_workers",
         "Workers that the load asks for, with hysteresis; an external metric for an autoscaler.", IDENTITY),
        ("gauge", "worker_loss_hit_tokens",
         "Cached tokens that requests found of late and no other worker holds: lost if this one is removed.", _T),
        ("gauge", "worker_loss_gpu_seconds", "GPU time to compute worker_loss_hit_tokens again.", _T),
    ),
    "hotspot": (
        ("gauge", "hotspot_overloaded_ratio",
         "Share of workers with more than 1.5 times the mean load of their peers.", IDENTITY),
        ("gauge", "hotspot_max_over_mean", "Load of the busiest worker over the mean of its peers.", IDENTITY),
        ("gauge", "hotspot_busiest_over_least", "Load of the busiest worker over the least busy of its peers.",
         IDENTITY),
        ("gauge", "hotspot_top_share_ratio", "Share of the window's requests on the busiest worker of its peers.",
         IDENTITY),
        ("gauge", "worker_load_requests", "Requests running and waiting, mean over the window.", ("target", "engine")),
    ),
    "kv blocks": (
        ("counter", "kv_blocks_evicted", "KV blocks evicted, from KV events.", _T),
        ("counter", "kv_blocks_regretted", "KV blocks stored again within 5 minutes of their eviction.", _T),
        ("counter", "kv_blocks_stored", "KV blocks stored, from KV events.", _T),
        ("gauge", "kv_blocks_resident", "KV blocks in the prefix cache, from KV events.", _T),
        ("histogram", "kv_block_lifetime_seconds", "Time between a KV block's storing and its eviction.", _T),
        ("gauge", "kv_events_lag_seconds", "Delay between the engine's clock and the arrival of its last event batch.",
         _T),
        ("counter", "kv_event_batches", "KV-event batches applied.", _T),
        ("counter", "kv_event_batches_missed", "KV-event batches lost and not recoverable by replay.", _T),
        ("counter", "kv_event_batches_replayed", "KV-event batches recovered by replay.", _T),
        ("counter", "kv_cache_clears", "Times that the whole prefix cache of a target was cleared or lost track of.",
         _T),
    ),
    "prefix tree": (
        ("gauge", "prefix_tree_blocks", "Distinct KV blocks cached on any worker, from KV events.", ()),
        ("gauge", "prefix_tree_height_levels", "Branch points on the longest path of the prefix tree.", ()),
        ("summary", "prefix_tree_depth_levels", "Branch points above a leaf of the prefix tree, by quantile.",
         ("quantile",)),
        ("summary", "prefix_tree_fan_out", "Children of a branch point of the prefix tree, by quantile.",
         ("quantile",)),
        ("summary", "prefix_block_replicas", "Workers that hold a KV block, by quantile of the distinct blocks.",
         ("quantile",)),
        ("gauge", "prefix_hot_branch_tokens", "Cached tokens below one of the hottest branches.", ("prefix",)),
        ("gauge", "named_prefix_request_share_ratio",
         "Share of the requests that open with a named prefix, in the last span of 5 minutes (before) and the running "
         "one (now).", ("prefix", "span")),
        ("gauge", "named_prefix_hit_share_ratio",
         "Of the requests that open with a named prefix, those that found it cached, by span.", ("prefix", "span")),
    ),
    "transfer": (
        ("histogram", "kv_transfer_seconds", "Duration of KV-block transfers.", ("source", "destination")),
        ("counter", "kv_transfer_bytes", "KV bytes transferred.", ("source", "destination")),
        ("counter", "kv_transfer_failures", "KV transfers that failed.", ("source", "destination")),
        ("gauge", "kv_transfer_break_even_tokens",
         "Prefix length above which transferring KV blocks is faster than computing them.",
         ("source", "destination")),
    ),
    "coupled optimisations": (
        ("counter", "speculative_draft_tokens", "Tokens proposed by speculative decoding.", _TM),
        ("counter", "speculative_accepted_tokens", "Proposed tokens that were accepted.", _TM),
        ("gauge", "moe_expert_alignment_ratio", "Mean expert load over the busiest expert's load, from 0 to 1.", _T),
        ("counter", "affinity_admissions",
         "Requests whose prefix a worker held, by where they were admitted: held or elsewhere.", (*SERVED, "result")),
        ("counter", "preemptions", "Requests preempted and recomputed later.", _TM),
    ),
    "engine": (
        ("gauge", "requests_running", "Requests in the engine's batch.", ("target", "engine")),
        ("gauge", "requests_waiting", "Requests queued at the engine.", ("target", "engine")),
        ("gauge", "kv_usage_ratio", "KV cache in use, from 0 to 1, sampled at the scrape.", ("target", "engine")),
        ("gauge", "kv_capacity_blocks", "KV blocks that fit into the target's cache.", _T),
        ("gauge", "block_size_tokens", "Tokens in a KV block.", _T),
        ("counter", "kv_store_query_tokens",
         "Prompt tokens that engines looked up in a KV store after their own cache missed.", _TM),
        ("counter", "kv_store_hit_tokens",
         "Prompt tokens found in the KV store, by its tier. Engines count the same tokens as hits of a remote tier.",
         ("target", "model", "tier")),
        ("counter", "kv_store_query_objects", "Objects looked up in the KV store, in its own unit.", _T),
        ("counter", "kv_store_hit_objects", "Objects found in the KV store, in its own unit.", _T),
        ("counter", "kv_evicted_tokens", "Tokens evicted from KV caches, as counted by the target.", _T),
        ("counter", "kv_evicted_objects", "KV objects or chunks evicted, as counted by the target.", _T),
        ("histogram", "kv_block_idle_before_evict_seconds",
         "Time between a KV block's last use and its eviction, as sampled by the target.", _T),
        ("gauge", "gpu_utilization_ratio", "Share of time in which the GPU was busy.", ("target", "gpu")),
        ("gauge", "gpu_tensor_active_ratio", "Share of cycles in which the GPU's tensor cores were active.",
         ("target", "gpu")),
        ("gauge", "gpu_power_watts", "Power drawn by the GPU.", ("target", "gpu")),
        ("counter", "gpu_energy_joules", "Energy used by the GPU.", ("target", "gpu")),
        ("summary", "engine_latency_quantile_seconds",
         "Quantiles of the TTFT and inter-token latency that the target itself measures, in the window.",
         ("target", "latency", "quantile")),
    ),
    "engine sums": (
        ("histogram", "engine_ttft_seconds",
         "Time to first token as engines measure it, summed over all engines; not split by cache class.", IDENTITY),
        ("histogram", "engine_inter_token_seconds", "Time between output tokens, summed over all engines.", IDENTITY),
        ("histogram", "engine_tpot_seconds",
         "Time per output token after the first, one mean a request, summed over all engines.", IDENTITY),
        ("histogram", "engine_prefill_seconds",
         "Time of a request's prefill as engines measure it, from its first step to its first token.", IDENTITY),
        ("histogram", "engine_request_prompt_tokens", "Prompt length of the requests of all engines.", IDENTITY),
        ("histogram", "engine_request_computed_tokens",
         "Prompt tokens that were computed for a request, of the requests of all engines.", IDENTITY),
        ("histogram", "engine_request_generation_tokens", "Answer length of the requests of all engines.", IDENTITY),
        ("histogram", "engine_e2e_seconds", "Duration of requests as engines measure it, summed over all engines.",
         IDENTITY),
        ("histogram", "engine_queue_seconds", "Time that requests waited in engines' queues, summed over all engines.",
         IDENTITY),
        ("gauge", "engine_started_seconds", "Unix time at which the last of the engines started, with an empty cache.",
         IDENTITY),
        ("counter", "engine_prompt_tokens", "Prompt tokens of all engines.", IDENTITY),
        ("counter", "engine_generation_tokens", "Output tokens of all engines.", IDENTITY),
        ("counter", "engine_refused_requests", "Requests that engines turned away because their queue was at its "
         "limit.", IDENTITY),
        ("counter", "engine_finished_requests", "Requests that engines finished, by the engine's finish reason.",
         (*IDENTITY, "reason")),
    ),
    **OWN,
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    name: Family(name, kind, text, labels, group) for group, rows in _TABLE.items() for kind, name, text, labels in rows
}
