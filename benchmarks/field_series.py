"""The exporter's series of a fleet in the field: hundreds of workers of three models, six routers, unequal tenants.

Poisson loads that differ by model, 50 tenants that burst, counters that grow by chance; one value a minute. A fault
changes the last minutes. Benchmarks write the series into a real Prometheus' storage or give them to promtool.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

MODELS = {"llama-70b": (0.5, 12.0, 0.040), "qwen-32b": (0.3, 8.0, 0.020), "gemma-8b": (0.2, 5.0, 0.010)}
"""Model: share of the workers, mean load of one, seconds per output token."""
TENANTS = 50
ROUTERS = 6
START_UNIX_SECONDS = 1_790_000_000
_PROMPT_TOKENS = 1_800.0
_HIT_RATIO = 0.72
_OBJECTIVES = {"availability": (1.0, 0.008), "goodput": (1.0, 0.03), "ttft": (0.99, 0.01), "tpot": (0.99, 0.01)} | {
    f"ttft-{length}": (0.2, 0.01) for length in ("short", "medium", "long", "very-long", "huge")
}
"""Objective that the exporter judges per request: the share of the requests that it is about, and of bad ones."""

Values = np.ndarray


class Field:
    """The fleet's series, a value a minute each. Counters are held as what each minute adds."""

    def __init__(self, workers: int, seed: int, quiet_minutes: int = 60, fault_minutes: int = 10) -> None:
        self.random = np.random.default_rng(seed)
        self.quiet_minutes, self.minutes = quiet_minutes, quiet_minutes + fault_minutes
        self.counters: dict[str, Values] = {}
        self.gauges: dict[str, Values] = {}
        self.workers: list[tuple[str, str]] = []
        for model, (share, _, _) in MODELS.items():
            for _ in range(max(2, round(workers * share))):
                self.workers.append((f"worker-{len(self.workers):03}", model))
        self._engines()
        self._requests()
        self._routers()
        self._objectives()
        self._measuring()
        self._moves()

    @property
    def late(self) -> slice:
        """The minutes of the fault."""
        return slice(self.quiet_minutes, self.minutes)

    def of(self, model: str) -> list[str]:
        return [name for name, own in self.workers if own == model]

    def counter(self, name: str, per_minute: float | Values) -> None:
        mean = np.broadcast_to(np.asarray(per_minute, dtype=float), (self.minutes,))
        self.counters[f"prefixwatch_{name}"] = self.random.poisson(mean).astype(float)

    def gauge(self, name: str, value: float | Values) -> None:
        self.gauges[f"prefixwatch_{name}"] = np.broadcast_to(np.asarray(value, dtype=float), (self.minutes,)).copy()

    def add(self, name: str, per_minute: float) -> None:
        """Let a counter grow by this much a minute during the fault, whatever it did before."""
        self.counters.setdefault(f"prefixwatch_{name}", np.zeros(self.minutes))[self.late] = per_minute

    def scale(self, prefix: str, factor: float) -> None:
        """Multiply all counters and gauges of this beginning during the fault."""
        for series in (self.counters, self.gauges):
            for name, values in series.items():
                if name.startswith(f"prefixwatch_{prefix}"):
                    values[self.late] *= factor

    def set(self, name: str, value: float) -> None:
        """Give a gauge this value during the fault; before it, the series was absent or had another one."""
        values = self.gauges.setdefault(f"prefixwatch_{name}", np.full(self.minutes, np.nan))
        values[self.late] = value

    def drop(self, *prefixes: str) -> None:
        """Take all counters and gauges of these beginnings away, for the whole time."""
        named = tuple(f"prefixwatch_{prefix}" for prefix in prefixes)
        for series in (self.counters, self.gauges):
            for name in [name for name in series if name.startswith(named)]:
                del series[name]

    def _engines(self) -> None:
        peak: dict[str, Values] = {}
        for name, model in self.workers:
            _, mean, token_seconds = MODELS[model]
            own = f'{{target="{name}",model="{model}"}}'
            load = self.random.poisson(mean, self.minutes).astype(float)
            peak[model] = np.maximum(peak.get(model, load), load)
            self.gauge(f'target_up{{target="{name}",model="{model}",system="vllm",version="0.32"}}', 1)
            self.gauge(f'scrape_age_seconds{{target="{name}"}}', 2)
            self.gauge(f'data_quality_checks{{target="{name}"}}', 22)
            queried = mean * 60.0 * 1.6 * _PROMPT_TOKENS / 12.0
            ratio = min(0.95, float(self.random.normal(_HIT_RATIO, 0.04)))
            self.counter(f"prefix_query_tokens_total{own}", queried)
            self.counter(f'prefix_hit_tokens_total{{target="{name}",model="{model}",tier="gpu"}}', queried * ratio)
            self.counter(f"kv_cache_clears_total{own}", 0)
            self.counter(f"kv_event_batches_missed_total{own}", 0)
            self.counter(f"kv_blocks_evicted_total{own}", 120)
            self.counter(f"kv_blocks_regretted_total{own}", 1.5)
            self.counter(f"isolation_lost_hit_tokens_total{own}", queried * 0.01)
            self.counter(f"preemptions_total{own}", 0)
            self.gauge(f"kv_blocks_resident{own}", 9_600)
            self.gauge(f"kv_capacity_blocks{own}", 10_000)
            self.gauge(f"block_size_tokens{own}", 16)
            self.gauge(f"kv_events_lag_seconds{own}", 0.02)
            self.gauge(f"isolation_cached_tokens{own}", 150_000)
            self.gauge(f"isolation_duplicate_tokens{own}", 12_000)
            self.gauge(f"requests_running{own}", load)
            self.gauge(f"requests_waiting{own}", np.maximum(load - 2 * mean, 0))
            self.gauge(f"worker_load_requests{own}", load)
            self.gauge(f"kv_usage_ratio{own}", np.minimum(1.0, load * 0.035 + 0.05))
            self.gauge(f"router_in_flight_requests{own}", load + self.random.integers(0, 2, self.minutes))
            self.gauge(f"router_believed_blocks{own}", 9_500)
            self.gauge(f"in_flight_leak_requests{own}", self.random.integers(0, 2, self.minutes))
            slow = token_seconds * self.random.lognormal(0.0, 0.08, self.minutes)
            latency = f'target="{name}",model="{model}",latency="inter_token",quantile="0.5"'
            self.gauge(f"engine_latency_quantile_seconds{{{latency}}}", slow)
        for model, (_, mean, _) in MODELS.items():
            peers = len(self.of(model))
            self.gauge(f'hotspot_max_over_mean{{model="{model}"}}', peak[model] / mean)
            self.gauge(f'hotspot_top_share_ratio{{model="{model}"}}', 1.25 / peers)

    def _requests(self) -> None:
        weights = 1.0 / np.arange(1, TENANTS + 1) ** 1.1
        weights /= weights.sum()
        for model, (_, mean, _) in MODELS.items():
            served = f'model="{model}"'
            rate = mean * len(self.of(model)) * 8.0
            for outcome, share in (("completed", 0.99), ("refused", 0.004), ("failed", 0.003), ("timed_out", 0.001)):
                self.counter(f'requests_total{{{served},class="chat",outcome="{outcome}"}}', rate * share)
            prompts = rate * _PROMPT_TOKENS
            for number, weight in enumerate(weights):
                burst = np.where(self.random.random(self.minutes) < 0.05, 3.0, 1.0)
                tenant = f'{served},tenant="tenant-{number:02}"'
                self.counter(f"tenant_prompt_tokens_total{{{tenant}}}", prompts * weight * burst)
                reused = float(np.clip(self.random.normal(_HIT_RATIO, 0.05), 0.5, 0.9))
                self.counter(f"tenant_hit_tokens_total{{{tenant}}}", prompts * weight * burst * reused)
            for stage, share in (("held", 0.80), ("routed", 0.76), ("delivered", _HIT_RATIO)):
                self.counter(f'prefix_funnel_tokens_total{{{served},stage="{stage}"}}', prompts * share)
            self.counter(f"predicted_hit_tokens_total{{{served}}}", prompts * 0.76)
            self.counter(f"delivered_hit_tokens_total{{{served}}}", prompts * _HIT_RATIO)
            self.counter(f'prompt_token_checks_total{{{served},result="equal"}}', rate * 0.99)
            self.counter(f'prompt_token_checks_total{{{served},result="different"}}', rate * 0.002)
            self.counter(f"sticky_requests_total{{{served}}}", rate * 0.7)
            self.counter(f"sticky_collisions_total{{{served}}}", rate * 0.7 * 0.03)
            self.counter(f'session_migrations_total{{{served},scope="worker"}}', rate * 0.1)
            self.counter(f"cold_prefill_requests_total{{{served}}}", rate * 0.08)
            self.counter(f"isolation_audited_requests_total{{{served}}}", rate * 0.97)
            for kind in ("salt_reused", "stored_salt_shared", "salt_per_request"):
                self.counter(f'isolation_findings_total{{{served},kind="{kind}",tier="unknown"}}', 0)
            for kind in ("cross_tenant_hit", "unsalted_traffic"):
                self.counter(f'isolation_violations_total{{{served},kind="{kind}"}}', 0)
            for reason, share in (("deepest_prefix", 0.75), ("load", 0.2), ("cold", 0.05)):
                self.counter(f'router_decisions_total{{{served},policy="cache_aware",reason="{reason}"}}', rate * share)

    def _routers(self) -> None:
        for change in ("joined", "left"):
            self.gauge(f'workers_changed{{change="{change}"}}', 0)
        self.gauge("sessions_moved_ratio", 0.05)
        self.gauge("router_block_size_tokens", 16)
        for number in range(ROUTERS):
            own = f'{{target="router-{number}"}}'
            self.gauge(f'target_up{{target="router-{number}",system="prefixwatch-router",version=""}}', 1)
            self.gauge(f'data_quality{{target="router-{number}",flag="shared_workers"}}', 1)
            self.gauge(f"router_oldest_in_flight_seconds{own}", self.random.uniform(20, 120, self.minutes))
            self.counter(f"router_untokenized_requests_total{own}", 2)
        self.counter('request_records_total{source="router"}', 10_000)
        self.histogram('router_decision_seconds{step="total"}', {0.001: 9_000, 0.005: 980, 0.012: 20})
        self.histogram('router_decision_seconds{step="lookup"}', {0.001: 9_990, 0.005: 10})
        self.histogram("prefill_wait_seconds", {0.1: 9_000, 1.0: 990, 5.0: 10})

    def _objectives(self) -> None:
        """What the shipped objectives count; all of them are met."""
        for model, (_, mean, _) in MODELS.items():
            served = f'model="{model}"'
            rate = mean * len(self.of(model)) * 8.0
            for slo, (share, bad) in _OBJECTIVES.items():
                for verdict, part in (("good", 1.0 - bad), ("bad", bad)):
                    own = f'{served},slo="{slo}",verdict="{verdict}"'
                    self.counter(f"slo_requests_total{{{own}}}", rate * share * part)
            self.counter(f'goodput_requests_total{{{served},class="chat"}}', rate * 0.97)
            self.histogram(f"prefix_miss_cost_ratio{{{served}}}", {1.5: rate * 0.12, 5.0: rate * 0.002})
            self.counter(f"session_prompt_tokens_total{{{served}}}", rate * _PROMPT_TOKENS * 0.6)
            self.counter(f"session_hit_tokens_total{{{served}}}", rate * _PROMPT_TOKENS * 0.6 * 0.9)

    def _moves(self) -> None:
        """A tenth of the later turns are served by another worker than the turn before."""
        for model, (_, mean, _) in MODELS.items():
            tokens = mean * len(self.of(model)) * 8.0 * _PROMPT_TOKENS * 0.06
            self.counter(f'session_moved_prompt_tokens_total{{model="{model}"}}', tokens)
            self.counter(f'session_moved_hit_tokens_total{{model="{model}"}}', tokens * 0.8)

    def _measuring(self) -> None:
        """What the exporter and Prometheus measure of themselves."""
        for name in (*(name for name, _ in self.workers), *(f"router-{number}" for number in range(ROUTERS))):
            self.counters[f'prefixwatch_scrapes_total{{target="{name}"}}'] = np.full(self.minutes, 12.0)
        self.gauge("config_last_reload_successful", 1)
        own = '{job="prefixwatch",instance="exporter:9477"}'
        self.gauges |= {
            f"up{own}": np.ones(self.minutes),
            f"scrape_duration_seconds{own}": self.random.uniform(0.1, 0.4, self.minutes),
            f"process_resident_memory_bytes{own}": self.random.uniform(180e6, 190e6, self.minutes),
        }

    def histogram(self, name: str, per_minute: Mapping[float, float]) -> None:
        family, _, labels = name.partition("{")
        inner = f"{labels.rstrip('}')}," if labels else ""
        counts = [self.random.poisson(mean, self.minutes).astype(float) for mean in per_minute.values()]
        for bound, values in zip(
            [*map(repr, per_minute), "+Inf"], [*np.cumsum(counts, axis=0), sum(counts)], strict=True
        ):
            self.counters[f'prefixwatch_{family}_bucket{{{inner}le="{bound}"}}'] = values
        self.counters[f"prefixwatch_{family}_count{{{inner.rstrip(',')}}}"] = np.sum(counts, axis=0)

    def series(self) -> dict[str, Values]:
        """Every series with its samples; NaN where it has none."""
        return {name: np.cumsum(added) for name, added in self.counters.items()} | self.gauges

    def openmetrics(self) -> str:
        """All series with their time stamps, as `promtool tsdb create-blocks-from openmetrics` reads them."""
        times = [str(START_UNIX_SECONDS + 60 * minute) for minute in range(self.minutes)]
        lines = [
            f"{name} {value:.10g} {at}"
            for name, values in self.series().items()
            for value, at in zip(values, times, strict=True)
            if not np.isnan(value)
        ]
        return "\n".join([*lines, "# EOF", ""])
