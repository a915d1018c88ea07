"""What engines say of their own load, read from their `/metrics`; only polled for policies that need it."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Sequence
from time import perf_counter

import aiohttp

from prefixwatch.router.bounded import TooLong, read_at_most
from prefixwatch.router.placement.ledger import Ledger
from prefixwatch.router.policy import LoadReport

POLL_SECONDS = 1.0
_PAGE_BYTES = 16 * 2**20
_log = logging.getLogger(__name__)

_FAMILIES = {
    "running": (
        *("vllm:num_requests_running", "sglang:num_running_reqs", "trtllm_num_requests_running"),
        "llamacpp:requests_processing",
    ),
    "waiting": (
        *("vllm:num_requests_waiting", "sglang:num_queue_reqs", "trtllm_num_requests_waiting"),
        "llamacpp:requests_deferred",
    ),
    "usage": (
        *("vllm:kv_cache_usage_perc", "sglang:token_usage", "trtllm_kv_cache_utilization"),
        "llamacpp:kv_cache_usage_ratio",
    ),
    "prefill_seconds": ("vllm:request_prefill_time_seconds_sum", "trtllm_request_prefill_time_seconds_sum"),
    "prefills": ("vllm:request_prefill_time_seconds_count", "trtllm_request_prefill_time_seconds_count"),
    "generated": ("vllm:generation_tokens_total", "sglang:generation_tokens_total", "trtllm_generation_tokens_total"),
}
_SAMPLE = {
    signal: re.compile(rb"^(?:" + "|".join(names).encode() + rb")(?:\{[^}]*\})? (\S+)", re.MULTILINE)
    for signal, names in _FAMILIES.items()
}

_VLLM_CACHE = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_BLOCKS = re.compile(rb'(?:^|,)(num_gpu_blocks|block_size)="(\d{1,18})"')
_SGLANG_CAPACITY = re.compile(rb"^sglang:max_total_num_tokens(?:\{[^}]*\})? (\S+)", re.MULTILINE)
_TENSORRT_BLOCKS = re.compile(rb"^trtllm_kv_cache_max_blocks(?:\{[^}]*\})? (\S+)", re.MULTILINE)
_TENSORRT_BLOCK_TOKENS = re.compile(rb"^trtllm_kv_cache_tokens_per_block(?:\{[^}]*\})? (\S+)", re.MULTILINE)


def load_report(metrics: bytes, at_seconds: float, generation_tokens_per_second: float | None = None) -> LoadReport:
    """The load in a metrics text; counts are summed over an engine's replicas, usage is the fullest one's, capacity
    the smallest one's."""
    running, waiting, usage = (_samples(metrics, signal) for signal in ("running", "waiting", "usage"))
    seconds, prefills = (_samples(metrics, signal) for signal in ("prefill_seconds", "prefills"))
    return LoadReport(
        at_seconds=at_seconds,
        running=int(sum(running)) if running else None,
        waiting=int(sum(waiting)) if waiting else None,
        kv_usage_ratio=max(usage) if usage else None,
        generation_tokens_per_second=generation_tokens_per_second,
        prefill_seconds_total=sum(seconds) if seconds else None,
        prefills_total=sum(prefills) if prefills else None,
        kv_capacity_tokens=min(_capacities(metrics), default=None),
    )


def generated_tokens(metrics: bytes) -> float | None:
    """The counter of tokens generated so far."""
    samples = _samples(metrics, "generated")
    return sum(samples) if samples else None


async def poll_load(name: str, url: str, session: aiohttp.ClientSession, ledger: Ledger) -> None:
    """Keep one worker's report fresh, forever. A poll that fails leaves the last report to age."""
    timeout = aiohttp.ClientTimeout(total=POLL_SECONDS)
    rate = _Rate()
    while True:
        try:
            async with session.get(f"{url}/metrics", timeout=timeout) as answer:
                text = await read_at_most(answer.content, _PAGE_BYTES) if answer.status == 200 else b""
            worker = ledger.worker(name)
            if text and worker is not None:
                now = perf_counter()
                ledger.reported_at[name] = now
                worker.report = load_report(text, now, rate.per_second(generated_tokens(text), now))
        except (aiohttp.ClientError, TimeoutError, TooLong):
            pass  # the last report ages
        except Exception:  # a page that nobody foresaw must not end the polling
            _log.exception("the load of %s can't be read", name)
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
    tokens = [int(value) for value in _numbers(_SGLANG_CAPACITY.findall(metrics))]
    sizes = _numbers(_TENSORRT_BLOCK_TOKENS.findall(metrics))
    tokens += [int(blocks * max(sizes)) for blocks in _numbers(_TENSORRT_BLOCKS.findall(metrics)) if sizes]
    for labels in _VLLM_CACHE.findall(metrics):
        found = {name: int(value) for name, value in _BLOCKS.findall(labels)}
        if found.keys() == {b"num_gpu_blocks", b"block_size"}:
            tokens.append(found[b"num_gpu_blocks"] * found[b"block_size"])
    return tokens


def _samples(metrics: bytes, signal: str) -> list[float]:
    return _numbers(_SAMPLE[signal].findall(metrics))


def _numbers(texts: Sequence[bytes]) -> list[float]:
    """The numbers of a family's samples; none where one of them isn't a finite number, for then the sum is unknown."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return []
    return numbers if all(map(math.isfinite, numbers)) else []
