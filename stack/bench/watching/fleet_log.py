"""The workers' signals and KV events while a run goes on, read as the exporter reads them: rows of `fleet.parquet`.

The first reading comes before the first request and the last one after the last answer, so that the engines' counters
span the run. Each row has the wall clock's time; run.json's `zero_unix_seconds` puts it on the request log's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.scraping.scrape import Scraper
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.kvcache.events.subscriber import KvEventSubscriber
from prefixwatch.loadgen.request_log.fleet_rows import FleetRow
from prefixwatch.stack.bench.schedule import Run
from prefixwatch.stack.bench.watching.kv_event_tally import KvEventTally

_INTERVAL_SECONDS = 1.0


class FleetLog:
    """Scrapes the engines once a second, and listens to their KV events, until it is left."""

    def __init__(self, engines: Sequence[EngineHandle], run: Run, rows: list[FleetRow]) -> None:
        """`engines` are one at least; `rows` gets what is read of them."""
        self._rows = rows
        self._run = run
        targets = tuple(TargetConfig(name=engine.name, url=f"{engine.url}/metrics") for engine in engines)
        settings = ExporterConfig(targets=targets, interval_seconds=_INTERVAL_SECONDS)
        catalogue = shipped_catalogue()
        self._targets = [Target(target, settings, catalogue) for target in targets]
        self._timeout_seconds, self._limit_bytes = settings.timeout_seconds, settings.limits.body_bytes
        self._events = [_Events(engine) for engine in engines]

    @classmethod
    @contextlib.asynccontextmanager
    async def following(cls, engines: Sequence[EngineHandle], run: Run) -> AsyncIterator[list[FleetRow]]:
        """The rows, which grow meanwhile; none of a target, whose engines nobody here knows."""
        rows: list[FleetRow] = []
        if not engines:
            yield rows
            return
        log = cls(engines, run, rows)
        scraper = Scraper(log._timeout_seconds, log._limit_bytes)
        listeners = [asyncio.create_task(events.subscriber.run()) for events in log._events]
        try:
            await log._read(scraper)
            follower = asyncio.create_task(log._follow(scraper))
            try:
                yield rows
            finally:
                await _cancelled(follower)
            await log._read(scraper)
        finally:
            for listener in listeners:
                await _cancelled(listener)
            await scraper.close()

    async def _follow(self, scraper: Scraper) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            await self._read(scraper)

    async def _read(self, scraper: Scraper) -> None:
        """One row a worker."""
        scrapes = await asyncio.gather(*(scraper.fetch(target.config.url) for target in self._targets))
        for target, scrape, events in zip(self._targets, scrapes, self._events, strict=True):
            target.ingest(scrape, time.monotonic())
            tally = events.tally if events.heard else None
            self._rows.append(engine_row(target, self._run, time.time(), tally))


def engine_row(target: Target, run: Run, unix_s: float, events: KvEventTally | None = None) -> FleetRow:
    """What is known of an engine after a reading of its page; `events` is the tally of one that publishes them."""
    numbers, store = target.numbers, target.store if target.up else None
    return FleetRow(
        unix_s=unix_s,
        policy=run.policy,
        repeat=run.repeat,
        worker=target.name,
        up=target.up,
        running=numbers.running if numbers else None,
        waiting=numbers.waiting if numbers else None,
        kv_usage_ratio=numbers.kv_usage_max_ratio if numbers else None,
        prefix_hit_tokens_total=store.total("prefix_hit_tokens") if store else None,
        prefix_query_tokens_total=store.total("prefix_query_tokens") if store else None,
        counter_resets=target.store.resets if target.store else 0,
        kv_blocks_stored_total=events.stored_blocks if events else None,
        kv_blocks_removed_total=events.removed_blocks if events else None,
        kv_cache_clears_total=events.clears if events else None,
        kv_batches_missed_total=events.missed_batches if events else None,
    )


class _Events:
    """One engine's KV events. No replay is asked for: it would bring what happened before the run."""

    def __init__(self, engine: EngineHandle) -> None:
        self.tally = KvEventTally(engine.name)
        endpoint = engine.kv_events_endpoint
        self.subscriber = KvEventSubscriber(engine.name, endpoint, None, self.tally)

    @property
    def heard(self) -> bool:
        """Whether the engine publishes events at all."""
        return self.subscriber.connected or self.tally.counters.batches > 0


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
