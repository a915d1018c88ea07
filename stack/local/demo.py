"""What `prefixwatch up` adds where no configuration is given: zones, a price and probes; and what to try next."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from prefixwatch.engines.tiny_model import MODEL_NAME
from prefixwatch.exporters.probes.config import ProbeConfig, ProbeTarget
from prefixwatch.loadgen.scenario.fleet_section import Workers
from prefixwatch.router.config import WorkerConfig
from prefixwatch.stack.config import PrefixwatchConfig
from prefixwatch.stack.local.traffic import Sender, Traffic

GPU_USD_PER_HOUR = 2.5
"""Assumed, so that panels about money have something to show."""
LOCUSTFILE = Path(__file__).parents[2] / "loadgen" / "locustfile.py"
ZONES = ("zone-a", "zone-b")


def with_places_and_price(config: PrefixwatchConfig) -> PrefixwatchConfig:
    """The same with its engines in two zones, a node each, and an assumed price, where it says nothing of them."""
    fleet, pricing = config.fleet, config.pricing
    if not fleet.kinds and not fleet.targets:
        kinds = [
            Workers(count=1, zone=ZONES[number * len(ZONES) // fleet.size], node=f"node-{number}")
            for number in range(fleet.size)
        ]
        fleet = fleet.model_copy(update={"kinds": kinds})
    if pricing.gpu_usd_per_hour is None:
        pricing = pricing.model_copy(update={"gpu_usd_per_hour": GPU_USD_PER_HOUR})
    return config.model_copy(update={"fleet": fleet, "pricing": pricing})


def with_probes(config: PrefixwatchConfig, workers: Sequence[WorkerConfig]) -> PrefixwatchConfig:
    """The same with probes of two lengths every ten seconds at each engine, and a canary between two tenants."""
    if config.exporter.probes is not None:
        return config
    probes = ProbeConfig.model_validate(
        {
            "targets": [ProbeTarget(name=each.name, url=each.url, model=MODEL_NAME) for each in workers],
            "interval_seconds": 10.0,
            "prompt_tokens": [256, 1024],
            "tokens_per_minute": 200_000,
            "target_tokens_per_minute": 60_000,
            "isolation": {"every_rounds": 5},
        }
    )
    return config.model_copy(update={"exporter": config.exporter.model_copy(update={"probes": probes})})


@contextlib.asynccontextmanager
async def demo_traffic(router: str, rate_per_second: float) -> AsyncIterator[None]:
    """Meanwhile chats of three tenants, each with its salt, go to the router at random times, at this mean rate.

    A fifth as many long prompts that nobody has sent before make misses, and fill the caches within some ten minutes.
    """
    if not rate_per_second:
        yield
        return
    traffic = Traffic(
        rate_per_second=rate_per_second,
        opening_words=800,
        output_tokens=64,
        flood_per_second=0.2 * rate_per_second,
        flood_words=800,
        salt_per_tenant=True,
    )
    sender = Sender(router, traffic)
    sending = asyncio.create_task(sender.run(), name="demo traffic")
    try:
        yield
    finally:
        sending.cancel()
        await asyncio.wait([sending])


def traffic_lines(router: str, model_dir: Path | None, model: str | None) -> list[str]:
    """Commands that send traffic to the router; addresses without a slash at their end.

    `model_dir` has the tokenizer, else the engines are asked for it; `model` is that of engines which the stack
    started, None for others': a bench asks which one they have, Locust would have to be given it.
    """
    tokenizer = f" --model-dir {model_dir}" if model_dir is not None else ""
    lines = [f"prefixwatch bench shared-prefix --target {router}{tokenizer}"]
    if model is not None:
        lines.append(f"locust -f {LOCUSTFILE} --host {router} --model {model}{tokenizer} --scenario shared-prefix")
    return lines


def next_lines(exporter: str, prometheus: str | None) -> list[str]:
    """Commands that show what the stack measures; addresses without a slash at their end."""
    lines = [f"prefixwatch status --exporter {exporter}"]
    if prometheus is not None:
        lines += [
            f"prefixwatch dashboards check --prometheus {prometheus} --scrape-interval 5",
            f"prefixwatch diagnose --prometheus {prometheus}",
        ]
    return lines
