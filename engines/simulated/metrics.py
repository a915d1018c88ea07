"""`/metrics` of a simulated engine: the families, labels and bucket bounds of vLLM 0.32.

`engines.simulated.other_pages` has those of SGLang and TensorRT-LLM.

Totals come straight from the model at scrape time; only distributions are collected as tokens come out. As in
vLLM there is no eviction counter, KV usage counts blocks in use (not those kept for reuse), an aborted request is not
counted as finished, and every `_total` has a `_created` beside it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from prefixwatch.engines.model.engine import EngineModel
from prefixwatch.engines.model.sequence import SequenceState, TokenOut
from prefixwatch.engines.simulated.histogram import Histogram
from prefixwatch.engines.simulated.other_pages import PAGES, Ended, other_families

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TOKEN_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_STEP_TOKENS = tuple(float(1 if k == 0 else 4 << k) for k in range(13))  # 1, 8, 16 … 16384
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_GAP_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

_HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "request_prompt_tokens": (_TOKEN_COUNTS, "Prompt tokens of finished requests."),
    "request_generation_tokens": (_TOKEN_COUNTS, "Generated tokens of finished requests."),
    "iteration_tokens_total": (_STEP_TOKENS, "Prompt and generated tokens that an engine step completed."),
    "request_max_num_generation_tokens": (_TOKEN_COUNTS, "Most tokens that finished requests could generate."),
    "request_params_n": ((1, 2, 5, 10, 20), "The n parameter of finished requests."),
    "request_params_max_tokens": (_TOKEN_COUNTS, "The max_tokens parameter of finished requests."),
    "time_to_first_token_seconds": (_FIRST_TOKEN_SECONDS, "From arrival to the first token."),
    "inter_token_latency_seconds": (_TOKEN_GAP_SECONDS, "Between tokens of a request."),
    "request_time_per_output_token_seconds": (_TOKEN_GAP_SECONDS, "A request's mean time a token after its first."),
    "e2e_request_latency_seconds": (_REQUEST_SECONDS, "From arrival to the last token."),
    "request_queue_time_seconds": (_REQUEST_SECONDS, "Waiting, before the first step with the request."),
    "request_inference_time_seconds": (_REQUEST_SECONDS, "From the first step with the request to its last token."),
    "request_prefill_time_seconds": (_REQUEST_SECONDS, "From the first step with the request to its first token."),
    "request_decode_time_seconds": (_REQUEST_SECONDS, "From a request's first token to its last."),
    "request_num_preemptions": ((1, 2, 3, 4, 5, 10, 20), "Times a request was preempted."),
    "request_prefill_kv_computed_tokens": (_TOKEN_COUNTS, "Prompt tokens computed, those from the cache left out."),
}

_REASONS = ("stop", "length", "abort", "error", "repetition")


class EngineMetrics(Collector):
    """Feed it every step's tokens; `render` is the body of `/metrics`."""

    def __init__(self, model: EngineModel, model_name: str) -> None:
        self._model = model
        self._names = ["engine", "model_name"]
        self._values = ["0", model_name]
        self._created = time.time()
        self._page = PAGES.get(model.config.kind)
        bounds_of = {name: bounds for name, (bounds, _) in _HISTOGRAMS.items()}
        if self._page is not None:
            bounds_of = {name: bounds for name, (_, bounds, _) in self._page.histograms.items()}
        self._histograms = {name: Histogram(bounds) for name, bounds in bounds_of.items()}
        self._ended = Ended()
        self._finished = dict.fromkeys(_REASONS, 0)
        self._registry = CollectorRegistry()
        GCCollector(self._registry)
        PlatformCollector(self._registry)
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def on_tokens(self, tokens: list[TokenOut]) -> None:
        """The tokens of one step."""
        if not tokens:
            return
        completed = 0
        for token in tokens:
            sequence = token.sequence
            completed += 1
            if token.gap_s is not None:
                self._observe("inter_token_latency_seconds", token.gap_s)
            elif sequence.first_token_s is not None:
                completed += sequence.prompt_tokens - (sequence.cached_tokens or 0)
                self._observe("time_to_first_token_seconds", sequence.first_token_s - sequence.arrival_s)
            if token.finish_reason is not None:
                self._on_finished(sequence, token.finish_reason)
        self._observe("iteration_tokens_total", completed)

    def _on_finished(self, sequence: SequenceState, reason: str) -> None:
        self._finished[reason] += 1
        scheduled, first, last = sequence.scheduled_s, sequence.first_token_s, sequence.last_token_s
        if scheduled is None or first is None or last is None:
            return  # unreachable for a request that has generated a token
        decode_s, later_tokens = last - first, sequence.generated_tokens - 1
        observed = {
            "request_prompt_tokens": sequence.prompt_tokens,
            "request_generation_tokens": sequence.generated_tokens,
            "request_max_num_generation_tokens": sequence.generated_tokens,
            "request_params_n": 1,
            "request_params_max_tokens": sequence.max_tokens,
            "request_time_per_output_token_seconds": decode_s / later_tokens if later_tokens else 0.0,
            "e2e_request_latency_seconds": last - sequence.arrival_s,
            "request_queue_time_seconds": scheduled - sequence.arrival_s,
            "request_inference_time_seconds": last - scheduled,
            "request_prefill_time_seconds": first - scheduled,
            "request_decode_time_seconds": decode_s,
            "request_num_preemptions": sequence.preemptions,
            "request_prefill_kv_computed_tokens": sequence.prompt_tokens - (sequence.cached_tokens or 0),
        }
        for name, value in observed.items():
            self._observe(name, value)
        self._ended.add(sequence)

    def _observe(self, name: str, value: float) -> None:
        if (histogram := self._histograms.get(name)) is not None:
            histogram.observe(value)

    def collect(self) -> Iterable[Metric]:
        if self._page is not None:
            yield from other_families(self._page, self._model, self._ended, self._histograms, self._values[1])
            return
        yield from self._gauges()
        yield from self._counters()
        for name, (_, text) in _HISTOGRAMS.items():
            histogram = self._histograms[name]
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=self._names)
            family.add_metric(self._values, histogram.buckets(), histogram.total)
            family.add_sample(f"vllm:{name}_created", dict(zip(self._names, self._values, strict=True)), self._created)
            yield family

    def _gauges(self) -> Iterator[Metric]:
        model = self._model
        yield self._gauge("num_requests_running", "Requests in the batch.", model.running)
        yield self._gauge("num_requests_waiting", "Requests that wait for the batch.", model.waiting)
        by_reason = {"capacity": model.waiting, "deferred": 0}
        yield self._gauge_by("num_requests_waiting_by_reason", "Waiting requests by reason.", "reason", by_reason)
        awake = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        yield self._gauge_by("engine_sleep_state", "1 for the state the engine is in.", "sleep_state", awake)
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use; 1 is all of them.", model.kv_usage_ratio)
        yield self._cache_config()

    def _counters(self) -> Iterator[Metric]:
        totals = self._model.counters
        computed = totals.prompt_tokens - totals.cached_prompt_tokens
        sources = {"local_compute": computed, "local_cache_hit": totals.cached_prompt_tokens, "external_kv_transfer": 0}
        tiers = {"device": totals.hit_tokens, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0}
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", totals.query_tokens)
        yield self._counter("prefix_cache_hits", "Of these, tokens found.", totals.hit_tokens)
        yield self._counter("external_prefix_cache_queries", "Tokens looked up in a connected cache: none.", 0)
        yield self._counter("external_prefix_cache_hits", "Of these, tokens found.", 0)
        yield self._counter("mm_cache_queries", "Items looked up in the multimodal cache: none.", 0)
        yield self._counter("mm_cache_hits", "Of these, items found.", 0)
        yield self._counter("num_preemptions", "Requests preempted.", totals.preempted_requests)
        yield self._counter("prompt_tokens", "Prompt tokens, cached or computed.", totals.prompt_tokens)
        yield self._counter_by("prompt_tokens_by_source", "Prompt tokens by where they came from.", "source", sources)
        yield self._counter("prompt_tokens_cached", "Prompt tokens from a cache.", totals.cached_prompt_tokens)
        yield self._counter_by("prompt_tokens_cached_by_source", "Prefix hit tokens by cache tier.", "source", tiers)
        yield self._counter("generation_tokens", "Tokens generated.", totals.generation_tokens)
        yield self._counter_by("request_success", "Finished requests by reason.", "finished_reason", self._finished)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _gauge_by(self, name: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=[*self._names, label])
        for key, value in values.items():
            family.add_metric([*self._values, key], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=self._names)
        family.add_metric(self._values, value, created=self._created)
        return family

    def _counter_by(self, name: str, text: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=[*self._names, label])
        for key, value in values.items():
            family.add_metric([*self._values, key], value, created=self._created)
        return family

    def _cache_config(self) -> GaugeMetricFamily:
        """Those labels of vLLM's that mean something here; an engine without a block limit has no block count."""
        config = self._model.config
        blocks = config.capacity_blocks
        labels = {
            "block_size": str(config.block_size),
            "enable_prefix_caching": "True",
            "engine": "0",
            "kv_cache_size_tokens": str(blocks * config.block_size if blocks else None),
            "num_gpu_blocks": str(blocks),
            "prefix_caching_hash_algo": "xxh3_64",
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is set up.", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family
