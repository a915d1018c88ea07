"""The dashboards' test stack for a fleet in the field: hundreds of workers' series, served as one exporter's page that
changes every second, scraped by a real Prometheus with the shipped rules on a fast clock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
from aiohttp import web

from benchmarks.field_series import MODELS, Field
from prefixwatch.engines.process import ManagedProcess, free_port
from prefixwatch.stack.local.monitoring import prometheus_command
from tests.stack.dashboard_stack import prometheus_config, rules_folder, written

_READY_SECONDS = 120.0
_SECONDS = 600
"""Of traffic that there is; the last ones repeat nothing."""
_TOKENS = (16.0, 64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16_384.0)
_PROMPTS = (0.0, 0.01, 0.04, 0.1, 0.18, 0.1, 0.12, 0.35, 0.1)
"""Shares of the prompts by length: chats and documents, two bands."""
_ANSWERS = (0.1, 0.3, 0.4, 0.15, 0.05)


class DrawnField(Field):
    """Every family that a panel of traffic, caches or engines reads, at rates of a second."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, seed=7, quiet_minutes=_SECONDS, fault_minutes=0)
        for model, (_, mean, gap) in MODELS.items():
            self._requests_of(model, mean * len(self.of(model)) * 8.0, gap)
        for number, (name, model) in enumerate(self.workers):
            own = f'{{target="{name}",model="{model}"}}'
            self.gauge(f'prefix_hit_ratio{{target="{name}",model="{model}",source="cache"}}', 0.55 + number % 40 / 100)
            self.gauge(f"effective_cache_value_tokens{own}", 100_000 + 250 * number)
            self.gauge(f'scrape_duration_seconds{{target="{name}"}}', self.random.lognormal(-4.0, 0.4, self.minutes))
        self._of_the_fleet()

    def _requests_of(self, model: str, rate: float, gap: float) -> None:
        own, hit = f'model="{model}"', 0.6
        wave = 1.0 + 0.3 * np.sin(np.arange(self.minutes) / 40.0)
        for cache, share, times in (
            ("hit", hit, (0.05, 0.1, 0.2)),
            ("partial", 0.3, (0.1, 0.2, 0.4)),
            ("miss", 0.1, (0.3, 0.75, 2.0)),
        ):
            shares = (0.6, 0.35, 0.05)
            counts = {at: rate * share * part for at, part in zip(times, shares, strict=True)}
            self.histogram(f'ttft_seconds{{{own},cache="{cache}"}}', counts)
            if cache != "partial":
                self.histogram(f'ttft_by_length_seconds{{{own},cache="{cache}",length="2048-8192"}}', counts)
        self.histogram(f'tpot_seconds{{{own},class="chat"}}', {gap: rate * 0.6, gap * 2: rate * 0.38, 0.3: rate * 0.02})
        self.histogram(f'e2e_seconds{{{own},class="chat"}}', {1.0: rate * 0.3, 5.0: rate * 0.6, 20.0: rate * 0.1})
        self.histogram(f"request_hit_tokens{{{own}}}", dict(zip(_TOKENS, rate * np.array(_PROMPTS), strict=True)))
        lengths = dict(zip(_TOKENS, rate * np.array(_PROMPTS), strict=True))
        self.histogram(f"engine_request_prompt_tokens{{{own}}}", lengths)
        answers = dict(zip(_TOKENS[:5], rate * np.array(_ANSWERS), strict=True))
        self.histogram(f"engine_request_generation_tokens{{{own}}}", answers)
        first = {0.06: rate * hit, 0.25: rate * 0.1, 0.75: rate * 0.28, 2.5: rate * 0.02}
        self.histogram(f"engine_ttft_seconds{{{own}}}", first)
        self.histogram(f"engine_inter_token_seconds{{{own}}}", {0.025: rate * 60, 0.05: rate * 30, 0.4: rate * 2})
        self.histogram(f"engine_prefill_seconds{{{own}}}", {0.1: rate * 0.7, 0.5: rate * 0.3})
        self.histogram(f"engine_e2e_seconds{{{own}}}", {1.0: rate * 0.3, 5.0: rate * 0.6, 20.0: rate * 0.1})
        self.histogram(f"cold_prefill_seconds{{{own}}}", {0.5: rate * 0.06, 2.0: rate * 0.02})
        self.histogram(f"warm_prefill_seconds{{{own}}}", {0.05: rate * 0.3, 0.1: rate * 0.1})
        self.counter(f"engine_prompt_tokens_total{{{own}}}", rate * 1_800 * wave)
        self.counter(f"engine_generation_tokens_total{{{own}}}", rate * 180 * wave)
        self.counter(f'engine_finished_requests_total{{{own},reason="stop"}}', rate * wave)
        saved, price = rate * 0.4, 2.5 / 3600
        self.counter(f"prefill_saved_gpu_seconds_total{{{own}}}", saved)
        self.counter(f"prefill_saved_usd_total{{{own}}}", saved * price * 1_000)
        self.counter(f"cold_prefill_gpu_seconds_total{{{own}}}", saved * 0.3)
        self.counter(f"cold_prefill_cost_usd_total{{{own}}}", saved * price * 300)
        for size, ratio in (("0.5", 0.51), ("1", 0.70), ("1.2", 0.73), ("2", 0.79), ("4", 0.82)):
            self.gauge(f'cache_size_hit_ratio{{{own},size="{size}"}}', ratio)
        for quantile, cost in (("0.5", 0.4), ("0.95", 1.1)):
            self.gauge(f'ttft_miss_minus_hit_seconds{{{own},quantile="{quantile}"}}', cost)
        for cache in ("hit", "miss"):
            self.gauge(f'ttft_window_requests{{{own},cache="{cache}"}}', 400)
        self.gauge(f"hotspot_overloaded_ratio{{{own}}}", 0.04)
        self.gauge(f"hotspot_busiest_over_least{{{own}}}", 4.0)
        self.counter(f'affinity_admissions_total{{{own},result="held"}}', rate * 0.9)
        self.counter(f'affinity_admissions_total{{{own},result="elsewhere"}}', rate * 0.06)
        self.counter(f'topology_placements_total{{{own},result="in_zone"}}', rate * 0.9)
        self.counter(f'topology_placements_total{{{own},result="out_of_zone"}}', rate * 0.05)
        self.counter(f'goodput_tokens_total{{{own},class="chat"}}', rate * 170)
        for number in range(20):
            tenant = f'{own},tenant="tenant-{number:02}"'
            self.counter(f'tenant_requests_total{{{tenant},outcome="completed"}}', rate / (number + 2))
            self.histogram(f'tenant_ttft_seconds{{{tenant},cache="hit"}}', {0.1: rate / 40, 0.5: rate / 90})

    def _of_the_fleet(self) -> None:
        for name, value in (("depth_levels", 9), ("fan_out", 40)):
            self.gauge(f'prefix_tree_{name}{{quantile="0.99"}}', value)
        self.gauge("prefix_tree_height_levels", 14)
        self.gauge('prefix_block_replicas{quantile="0.99"}', 12)
        for number in range(12):
            self.gauge(f'prefix_hot_branch_tokens{{prefix="system prompt {number}"}}', 90_000 / (number + 1))
        for dimension, share in (("temporal", 0.8), ("identity", 0.9), ("topological", 0.95), ("spatial", 0.4)):
            self.gauge(f'locality_ratio{{dimension="{dimension}"}}', share)
        self.gauge('isolation_audited_ratio{model="llama-70b"}', 0.97)
        self.gauge('build_info{version="1.0",python="3.12"}', 1)
        self.gauge('discovered_targets{discovery="static"}', len(self.workers))
        self.counter('kv_event_batches_replayed_total{target="worker-000"}', 0)
        for name, model in self.workers[:20]:
            own = f'target="{name}",model="{model}"'
            self.histogram(f"kv_block_lifetime_seconds{{{own}}}", {60.0: 30, 600.0: 80, 3600.0: 10})
        self.histogram('probe_ttft_seconds{target="worker-000",temperature="cold"}', {0.5: 2})
        self.histogram('probe_ttft_seconds{target="worker-000",temperature="repeat"}', {0.05: 2})

    def page(self, second: int) -> str:
        """The exporter's page at this second; what its counters add a minute, they add in 60 of them."""
        at = min(second, self.minutes - 1)
        counters = (f"{name} {values[at]:.10g}" for name, values in self._totals.items())
        own = {name: values for name, values in self.gauges.items() if name.startswith("prefixwatch_")}
        gauges = (f"{name} {values[at]:.10g}" for name, values in own.items())
        return "\n".join(
            [*counters, *gauges, f"process_resident_memory_bytes {185e6 + 1e6 * np.sin(at / 20):.10g}", ""]
        )

    def settle(self) -> None:
        """Add the counters up."""
        self._totals = {name: np.cumsum(added) / 60.0 for name, added in self.counters.items()}


@contextlib.asynccontextmanager
async def field_prometheus(folder: Path, workers: int) -> AsyncIterator[str]:
    """The address of a Prometheus that watches so many workers."""
    field = DrawnField(workers)
    field.settle()
    began = time.monotonic()

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=field.page(int(time.monotonic() - began)))

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    exporter = f"127.0.0.1:{runner.addresses[0][1]}"
    scraping = written(folder, "prometheus", prometheus_config(rules_folder(folder), exporter))
    scraping.rename(folder / "prometheus.yml")
    address = f"127.0.0.1:{free_port()}"
    process = ManagedProcess("prometheus", prometheus_command("prometheus", folder, address), folder / "prometheus.log")
    try:
        await process.wait_ready(f"http://{address}/-/ready", _READY_SECONDS)
        yield f"http://{address}"
    finally:
        process.kill()
        await runner.cleanup()
