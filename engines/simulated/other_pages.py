"""`/metrics` of a simulated SGLang or TensorRT-LLM: their families, labels and bucket bounds.

Sources: SGLang 0.5.11 `metrics_collector.py`, TensorRT-LLM 1.2 `metrics/collector.py`. Both count tokens when a request
finishes. SGLang shows its counters from the first finished request on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from prefixwatch.engines.model.engine import EngineModel
from prefixwatch.engines.model.kinds import EngineKind
from prefixwatch.engines.model.sequence import SequenceState
from prefixwatch.engines.simulated.histogram import Histogram

Bounds = tuple[float, ...]
Labels = dict[str, str]

_SGLANG_SECONDS = (
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0),
)
_SGLANG_REQUEST_SECONDS = (*_SGLANG_SECONDS, 600.0, 1200.0, 1800.0, 2400.0)
_SGLANG_GAP_SECONDS = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0),
)
_TENSORRT_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TENSORRT_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_TENSORRT_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


@dataclass(slots=True)
class Ended:
    """Tokens of finished requests."""

    reasons: Counter[str] = field(default_factory=Counter)
    """Requests by how they finished."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def add(self, sequence: SequenceState) -> None:
        self.reasons[sequence.finish_reason or ""] += 1
        self.prompt_tokens += sequence.prompt_tokens
        self.cached_tokens += sequence.cached_tokens or 0
        self.generated_tokens += sequence.generated_tokens


@dataclass(frozen=True, slots=True)
class Page:
    """One system's page. A figure is a family's name, value and help text."""

    prefix: str
    labels: Labels
    """Besides `model_name`, of histograms and counters; those of gauges are `gauge_labels` more."""
    gauge_labels: Labels
    histograms: Mapping[str, tuple[str, Bounds, str]]
    """By the name under which a value is observed: its family, bounds and help text."""
    gauges: Callable[[EngineModel], list[Figure]]
    counters: Callable[[EngineModel, Ended], list[Figure]]


Figure = tuple[str, float, str, Labels]
"""A family's name, its value, its help text, and labels of its own."""


def other_families(
    page: Page, model: EngineModel, ended: Ended, histograms: Mapping[str, Histogram], model_name: str
) -> Iterator[Metric]:
    """All families of the page."""
    labels = {**page.labels, "model_name": model_name}
    for name, value, text, own in page.gauges(model):
        given = {**labels, **page.gauge_labels, **own}
        gauge = GaugeMetricFamily(page.prefix + name, text, labels=list(given))
        gauge.add_metric(list(given.values()), value)
        yield gauge
    for name, value, text, own in page.counters(model, ended):
        given = {**labels, **own}
        counter = CounterMetricFamily(page.prefix + name, text, labels=list(given))
        counter.add_metric(list(given.values()), value)
        yield counter
    for name, (family, _, text) in page.histograms.items():
        shown = HistogramMetricFamily(page.prefix + family, text, labels=list(labels))
        shown.add_metric(list(labels.values()), histograms[name].buckets(), histograms[name].total)
        yield shown


def _sglang_gauges(model: EngineModel) -> list[Figure]:
    config, pages = model.config, model.config.capacity_blocks or 0
    used, counters = model.pool.used_blocks * config.block_size, model.counters
    hit_rate = counters.hit_tokens / counters.query_tokens if counters.query_tokens else 0.0
    return [
        ("num_running_reqs", model.running, "The number of running requests.", {}),
        ("num_queue_reqs", model.waiting, "The number of requests in the waiting queue.", {}),
        ("num_used_tokens", used, "The number of used tokens.", {}),
        ("token_usage", model.kv_usage_ratio, "The token usage.", {}),
        ("cache_hit_rate", hit_rate, "The prefix cache hit rate.", {}),
        ("max_total_num_tokens", pages * config.block_size, "Tokens that the KV pool holds.", {}),
        ("num_pages", pages, "Pages of the KV pool.", {}),
        ("page_size", config.block_size, "Tokens per page.", {}),
    ]


def _sglang_counters(model: EngineModel, ended: Ended) -> list[Figure]:
    if not ended.reasons:
        return []
    figures: list[Figure] = [
        ("prompt_tokens", ended.prompt_tokens, "Number of prefill tokens processed.", {}),
        ("generation_tokens", ended.generated_tokens, "Number of generation tokens processed.", {}),
        ("num_requests", ended.reasons.total(), "Number of requests processed.", {}),
        ("num_retracted_requests", model.counters.preempted_requests, "Number of retracted requests.", {}),
    ]
    if ended.cached_tokens:
        text = "Number of cached prompt tokens."
        figures.append(("cached_tokens", ended.cached_tokens, text, {"cache_source": "device"}))
    return figures


def _tensorrt_gauges(model: EngineModel) -> list[Figure]:
    counters = model.counters
    hit_rate = counters.hit_blocks / counters.query_blocks if counters.query_blocks else 0.0
    return [
        ("num_requests_running", model.running, "Requests in the batch.", {}),
        ("num_requests_waiting", model.waiting, "Requests that wait for the batch.", {}),
        ("kv_cache_utilization", model.kv_usage_ratio, "Used over all blocks of the GPU pool.", {}),
        ("kv_cache_hit_rate", hit_rate, "Reused over all blocks of prompts.", {}),
        ("kv_cache_max_blocks", model.config.capacity_blocks or 0, "Blocks of the GPU pool.", {}),
        ("kv_cache_tokens_per_block", model.config.block_size, "Tokens per block.", {}),
    ]


def _tensorrt_counters(model: EngineModel, ended: Ended) -> list[Figure]:
    del model
    if not ended.reasons:
        return []
    text = "Requests by how they finished."
    return [
        *(("request_success", count, text, {"finished_reason": why}) for why, count in ended.reasons.items()),
        ("prompt_tokens", ended.prompt_tokens, "Prompt tokens of finished requests.", {}),
        ("prompt_cached_tokens", ended.cached_tokens, "Of these, tokens reused from the cache.", {}),
        ("generation_tokens", ended.generated_tokens, "Generated tokens of finished requests.", {}),
    ]


PAGES: Mapping[EngineKind, Page] = {
    "sglang": Page(
        prefix="sglang:",
        labels={"engine_type": "unified"},
        gauge_labels={"tp_rank": "0", "pp_rank": "0"},
        histograms={
            "time_to_first_token_seconds": ("time_to_first_token_seconds", _SGLANG_SECONDS, "Time to first token."),
            "inter_token_latency_seconds": ("inter_token_latency_seconds", _SGLANG_GAP_SECONDS, "Between tokens."),
            "e2e_request_latency_seconds": ("e2e_request_latency_seconds", _SGLANG_REQUEST_SECONDS, "Whole requests."),
            "request_queue_time_seconds": ("queue_time_seconds", _SGLANG_SECONDS, "Waiting for the batch."),
        },
        gauges=_sglang_gauges,
        counters=_sglang_counters,
    ),
    "tensorrt-llm": Page(
        prefix="trtllm_",
        labels={"engine_type": "trtllm"},
        gauge_labels={},
        histograms={
            "time_to_first_token_seconds": (
                *("time_to_first_token_seconds", _TENSORRT_FIRST_TOKEN_SECONDS, "Time to first token."),
            ),
            "request_time_per_output_token_seconds": (
                *("time_per_output_token_seconds", _TENSORRT_TOKEN_SECONDS, "A request's mean time per later token."),
            ),
            "e2e_request_latency_seconds": (
                *("e2e_request_latency_seconds", _TENSORRT_REQUEST_SECONDS, "Whole requests."),
            ),
            "request_queue_time_seconds": ("request_queue_time_seconds", _TENSORRT_REQUEST_SECONDS, "Waiting."),
            "request_prefill_time_seconds": ("request_prefill_time_seconds", _TENSORRT_REQUEST_SECONDS, "Prefill."),
        },
        gauges=_tensorrt_gauges,
        counters=_tensorrt_counters,
    ),
}
