"""What prefill costs where nothing was cached, and what the cache spared, in GPU seconds and money.

GPU time of a cold prefill is its worker's GPUs for the prefill's length: the baseline of that prompt length where one
is known, and never more than the TTFT, which also holds the wait. Until a baseline is known it is the TTFT.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric

from exporters.families import MIN_OBSERVATIONS
from exporters.requests.recent_times import RecentTimes
from exporters.requests.seen import SeenRequest, length_label
from exporters.requests.tally import Distributions, Tally
from kvcache.cache_class import HIT, MISS

Baseline = Callable[[int], float | None]
"""Seconds to prefill a cold prompt of so many tokens on an idle worker; None where that isn't known."""

_BASELINE_QUANTILE = 0.1


class ColdPrefill:
    """The group `cold prefill`, but for waiting times and the probes' own baseline.

    `baseline` is what probes measured; where it knows nothing, the fastest tenth of the misses of a length stands in.
    """

    def __init__(
        self, gpus_per_worker: float = 1.0, gpu_usd_per_hour: float | None = None, baseline: Baseline | None = None
    ) -> None:
        self._gpus = gpus_per_worker
        self._usd_per_second = None if gpu_usd_per_hour is None else gpu_usd_per_hour / 3600
        self._measured = baseline
        self._misses: dict[str, RecentTimes] = defaultdict(RecentTimes)
        self._cold = Distributions("cold_prefill_seconds")
        self._warm = Distributions("warm_prefill_seconds")
        self._cost_ratio = Distributions("prefix_miss_cost_ratio")
        self._requests = Tally("cold_prefill_requests")
        self._gpu_seconds = Tally("cold_prefill_gpu_seconds")
        self._usd = Tally("cold_prefill_cost_usd")
        self._saved_seconds = Tally("prefill_saved_gpu_seconds")
        self._saved_usd = Tally("prefill_saved_usd")

    def baseline(self, prompt_tokens: int) -> float | None:
        """Seconds of a cold prefill of this length."""
        measured = self._measured(prompt_tokens) if self._measured else None
        if measured is not None:
            return measured
        misses = self._misses.get(length_label(prompt_tokens))
        if misses is None or len(misses) < MIN_OBSERVATIONS:
            return None
        return misses.quantile(_BASELINE_QUANTILE)

    def record(self, seen: SeenRequest) -> None:
        ttft, prompt_tokens = seen.record.ttft_seconds, seen.record.prompt_tokens
        if prompt_tokens is None:
            return
        if seen.cached_tokens:
            self._spared(seen.cached_tokens, prompt_tokens)
        if ttft is None:
            return
        if seen.cache == HIT:
            self._warm.observe(ttft, of=seen.record)
        elif seen.cache == MISS:
            self._cold.observe(ttft, of=seen.record)
            self._missed(ttft, prompt_tokens)

    def _missed(self, ttft: float, prompt_tokens: int) -> None:
        baseline = self.baseline(prompt_tokens)
        if baseline:
            self._cost_ratio.observe(ttft / baseline)
        self._misses[length_label(prompt_tokens)].add(ttft)
        gpu_seconds = self._gpus * (ttft if baseline is None else min(ttft, baseline))
        self._requests.add(1)
        self._gpu_seconds.add(gpu_seconds)
        if self._usd_per_second is not None:
            self._usd.add(gpu_seconds * self._usd_per_second)

    def _spared(self, cached_tokens: int, prompt_tokens: int) -> None:
        baseline = self.baseline(prompt_tokens)
        if baseline is None:
            return
        gpu_seconds = self._gpus * baseline * cached_tokens / prompt_tokens
        self._saved_seconds.add(gpu_seconds)
        if self._usd_per_second is not None:
            self._saved_usd.add(gpu_seconds * self._usd_per_second)

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        for family in (self._cold, self._warm, self._cost_ratio):
            yield family.metric()
        for tally in (self._requests, self._gpu_seconds, self._usd, self._saved_seconds, self._saved_usd):
            yield tally.metric()
