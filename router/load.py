"""What engines say of their own load, read from their `/metrics`; only polled for policies that need it."""

from __future__ import annotations

import asyncio
import re
from time import perf_counter

import aiohttp

from router.ledger import Ledger
from router.policy import LoadReport

POLL_SECONDS = 1.0

_FAMILIES = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"),
    "usage": ("vllm:kv_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio"),
    "generated": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
}
_SAMPLE = {
    signal: re.compile(rb"^(?:" + "|".join(names).encode() + rb")(?:\{[^}]*\})? (\S+)", re.MULTILINE)
    for signal, names in _FAMILIES.items()
}

_VLLM_CACHE = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_BLOCKS = re.compile(rb'(?:^|,)(num_gpu_blocks|block_size)="(\d+)"')
_SGLANG_CAPACITY = re.compile(rb"^sglang:max_total_num_tokens(?:\{[^}]*\})? (\S+)", re.MULTILINE)


def load_report(metrics: bytes, at_seconds: float, generation_tokens_per_second: float | None = None) -> LoadReport:
    """The load in a metrics text; counts are summed over an engine's replicas, usage is the fullest one's, capacity
    the smallest one's."""
    running, waiting, usage = (_samples(metrics, signal) for signal in ("running", "waiting", "usage"))
    return LoadReport(
        at_seconds=at_seconds,
        running=int(sum(running)) if running else None,
        waiting=int(sum(waiting)) if waiting else None,
        kv_usage_ratio=max(usage) if usage else None,
        generation_tokens_per_second=generation_tokens_per_second,
        kv_capacity_tokens=min(_capacities(metrics), default=None),
    )


def generated_tokens(metrics: bytes) -> float | None:
    """The counter of tokens generated so far."""
    samples = _samples(metrics, "generated")
    return sum(samples) if samples else None


async def poll_load(name: str, url: str, session: aiohttp.ClientSession, ledger: Ledger) -> None:
    """Keep one worker's report fresh for ever; a poll that fails leaves the last report to age."""
    timeout = aiohttp.ClientTimeout(total=POLL_SECONDS)
    rate = _Rate()
    while True:
        try:
            async with session.get(f"{url}/metrics", timeout=timeout) as answer:
                text = await answer.read() if answer.status == 200 else b""
        except (aiohttp.ClientError, TimeoutError):
            text = b""
        worker = ledger.worker(name)
        if text and worker is not None:
            now = perf_counter()
            worker.report = load_report(text, now, rate.per_second(generated_tokens(text), now))
        await asyncio.sleep(POLL_SECONDS)


class _Rate:
    """A counter's speed between two readings; unknown at the first and after a reset."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def per_second(self, count: float | None, now: float) -> float | None:
        last, self._last = self._last, None if count is None else (now, count)
        if last is None or count is None or count < last[1]:
            return None
        return (count - last[1]) / (now - last[0])


def _capacities(metrics: bytes) -> list[int]:
    """Tokens of KV that each replica holds. vLLM says it in labels, with "None" for what isn't limited."""
    tokens = [int(float(value)) for value in _SGLANG_CAPACITY.findall(metrics)]
    for labels in _VLLM_CACHE.findall(metrics):
        found = {name: int(value) for name, value in _BLOCKS.findall(labels)}
        if found.keys() == {b"num_gpu_blocks", b"block_size"}:
            tokens.append(found[b"num_gpu_blocks"] * found[b"block_size"])
    return tokens


def _samples(metrics: bytes, signal: str) -> list[float]:
    return [float(value) for value in _SAMPLE[signal].findall(metrics)]
