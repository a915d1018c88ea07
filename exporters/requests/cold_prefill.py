"""What prefill costs where nothing was cached, and what the cache spared, in GPU seconds and money.

GPU time of a cold prefill is its worker's GPUs for the prefill's length: the baseline of that prompt length where one
is known, and never more than the TTFT, which also holds the wait. Until a baseline is known it is the TTFT.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric

from prefixwatch.exporters.metrics_page.families import MIN_OBSERVATIONS
from prefixwatch.exporters.requests.request import Identity, Request, length_label
from prefixwatch.exporters.requests.tally import Distributions, RecentTimes, Tally
from prefixwatch.kvcache.cache_class import HIT, MISS

Baseline = Callable[[str, int], float | None]
"""Seconds that an idle worker of a model needs to prefill a cold prompt of this many tokens; None if unknown."""

_BASELINE_QUANTILE = 0.1


class ColdPrefill:
    """The group `cold prefill`, except for waiting times and the probes' own baseline.

    `baseline` is what probes measured; where it knows nothing, the fastest tenth of the misses of a length is used.
    """

    def __init__(
        self, gpus_per_worker: float = 1.0, gpu_usd_per_hour: float | None = None, baseline: Baseline | None = None
    ) -> None:
        self._gpus = gpus_per_worker
        self._usd_per_second = None if gpu_usd_per_hour is None else gpu_usd_per_hour / 3600
        self._measured = baseline
        self._misses: dict[tuple[Identity, str], RecentTimes] = defaultdict(RecentTimes)
        self._cold = Distributions("cold_prefill_seconds")
        self._warm = Distributions("warm_prefill_seconds")
        self._cost_ratio = Distributions("prefix_miss_cost_ratio")
        self._requests = Tally("cold_prefill_requests")
        self._gpu_seconds = Tally("cold_prefill_gpu_seconds")
        self._usd = Tally("cold_prefill_cost_usd")
        self._saved_seconds = Tally("prefill_saved_gpu_seconds")
        self._saved_usd = Tally("prefill_saved_usd")

    def baseline(self, identity: Identity, prompt_tokens: int) -> float | None:
        """Seconds of a cold prefill of this length, for this model at this place."""
        measured = self._measured(identity.model, prompt_tokens) if self._measured else None
        if measured is not None:
            return measured
        misses = self._misses.get((identity, length_label(prompt_tokens)))
        if misses is None or len(misses) < MIN_OBSERVATIONS:
            return None
        return misses.quantile(_BASELINE_QUANTILE)

    def record(self, request: Request) -> None:
        ttft, prompt_tokens = request.record.ttft_seconds, request.record.prompt_tokens
        if prompt_tokens is None:
            return
        if request.cached_tokens:
            self._spared(request.identity, request.cached_tokens, prompt_tokens)
        if ttft is None:
            return
        if request.cache == HIT:
            self._warm.observe(ttft, *request.identity, of=request.record)
        elif request.cache == MISS:
            self._cold.observe(ttft, *request.identity, of=request.record)
            self._missed(request.identity, ttft, prompt_tokens)

    def _missed(self, identity: Identity, ttft: float, prompt_tokens: int) -> None:
        baseline = self.baseline(identity, prompt_tokens)
        if baseline:
            self._cost_ratio.observe(ttft / baseline, *identity)
        self._misses[identity, length_label(prompt_tokens)].add(ttft)
        gpu_seconds = self._gpus * (ttft if baseline is None else min(ttft, baseline))
        self._requests.add(1, *identity)
        self._gpu_seconds.add(gpu_seconds, *identity)
        if self._usd_per_second is not None:
            self._usd.add(gpu_seconds * self._usd_per_second, *identity)

    def _spared(self, identity: Identity, cached_tokens: int, prompt_tokens: int) -> None:
        baseline = self.baseline(identity, prompt_tokens)
        if baseline is None:
            return
        gpu_seconds = self._gpus * baseline * cached_tokens / prompt_tokens
        self._saved_seconds.add(gpu_seconds, *identity)
        if self._usd_per_second is not None:
            self._saved_usd.add(gpu_seconds * self._usd_per_second, *identity)

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        for family in (self._cold, self._warm, self._cost_ratio):
            yield family.metric()
        for tally in (self._requests, self._gpu_seconds, self._usd, self._saved_seconds, self._saved_usd):
            yield tally.metric()
