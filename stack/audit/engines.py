"""The engines behind an audit's target: which tier served a probe, by their counters, and how they are emptied."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import aiohttp

from prefixwatch.documents.errors import InputError
from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, Limits, TargetConfig
from prefixwatch.exporters.scraping.scrape import Scraper
from prefixwatch.exporters.scraping.target import Target

_TIMEOUT_SECONDS = 10.0
_SETTLE_SECONDS = 1.0
"""Counters follow an answer within an engine's step."""
_LOOK_SECONDS = 0.02


class Engines:
    """Reads the engines as the exporter does. Blocks: an audit sends nothing meanwhile."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        targets = tuple(TargetConfig(name=url, url=f"{url}/metrics") for url in self._urls)
        settings = ExporterConfig(targets=targets, timeout_seconds=_TIMEOUT_SECONDS, interval_seconds=_TIMEOUT_SECONDS)
        catalogue = shipped_catalogue()
        self._targets = [Target(target, settings, catalogue) for target in targets]
        self._runner = asyncio.Runner()
        self._scraper = Scraper(settings.timeout_seconds, settings.limits.body_bytes)

    def check(self) -> None:
        """Raises InputError for an engine whose metrics can't be read."""
        self._runner.run(self._read())
        for target in self._targets:
            if not target.up:
                raise InputError(
                    f"--engine {target.name}: its metrics can't be read ({target.reason}: {target.detail}): name the "
                    "engine itself, without a path"
                )

    def close(self) -> None:
        self._runner.run(self._scraper.close())
        self._runner.close()

    def hit_tokens(self) -> Mapping[str, int] | None:
        self._runner.run(self._read())
        sums: Counter[str] = Counter()
        for target in self._targets:
            if not target.up or target.store is None:
                return None
            for (tier,), tokens in target.store.totals_by("prefix_hit_tokens", "tier").items():
                sums[tier] += round(tokens)
        return sums

    def settled(self, before: Mapping[str, int], cached_tokens: int) -> Mapping[str, int] | None:
        """None where the counters of all engines grew by other than this request's tokens: others use them, too."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            now = self.hit_tokens()
            if now is None:
                return None
            grown = {
                tier: tokens - before.get(tier, 0) for tier, tokens in now.items() if tokens != before.get(tier, 0)
            }
            if sum(grown.values()) == cached_tokens:
                return grown
            if sum(grown.values()) > cached_tokens or time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_SECONDS)

    def empty(self) -> None:
        self._runner.run(self._empty())

    async def _read(self) -> None:
        scrapes = await asyncio.gather(*(self._scraper.fetch(target.config.url) for target in self._targets))
        for target, scrape in zip(self._targets, scrapes, strict=True):
            target.ingest(scrape, time.monotonic())

    async def _empty(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)) as session:
            for url in self._urls:
                address = f"{url}/reset_prefix_cache"
                try:
                    async with session.post(address) as response:
                        status = response.status
                except (aiohttp.ClientError, TimeoutError) as error:
                    raise InputError(f"--engine {url}: {error or type(error).__name__}: is it running?") from error
                if status != 200:
                    raise InputError(
                        f"--empty-engine-caches: {address} answers {status}: vLLM has it with VLLM_SERVER_DEV_MODE=1; "
                        "or leave the option out"
                    )


def lost_hit_tokens(exporter_url: str) -> float | None:
    """`prefixwatch_isolation_lost_hit_tokens_total` over all targets of an exporter; None where it isn't on its page.

    Raises InputError for an exporter that can't be read.
    """
    return asyncio.run(_lost_hit_tokens(exporter_url))


async def _lost_hit_tokens(exporter_url: str) -> float | None:
    address = f"{exporter_url.rstrip('/')}/metrics"
    scraper = Scraper(_TIMEOUT_SECONDS, Limits().body_bytes)
    try:
        scrape = await scraper.fetch(address)
    finally:
        await scraper.close()
    if scrape.body is None:
        raise InputError(f"--exporter {exporter_url}: {address} can't be read ({scrape.reason}: {scrape.detail})")
    lines = [line for line in scrape.body.decode("utf-8", "replace").splitlines() if line.startswith(_LOST)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines) if lines else None


_LOST = "prefixwatch_isolation_lost_hit_tokens_total{"
