"""The workers' signals while a run goes on, read as the exporter reads them: the rows of `fleet.parquet`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from engines.fleet import EngineHandle
from exporters.catalogue import shipped_catalogue
from exporters.config import ExporterConfig, TargetConfig
from exporters.scrape import Scraper
from exporters.target import Target
from stack.schedule import Run

_INTERVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class FleetRow:
    """One worker at one moment. Totals count from the worker's start; a figure it doesn't give is None."""

    unix_s: float
    policy: str
    repeat: int
    worker: str
    up: bool
    running: float | None
    waiting: float | None
    kv_usage_ratio: float | None
    prefix_hit_tokens_total: float | None
    prefix_query_tokens_total: float | None


SCHEMA = pa.schema(
    [
        ("unix_s", pa.float64()),
        ("policy", pa.string()),
        ("repeat", pa.int64()),
        ("worker", pa.string()),
        ("up", pa.bool_()),
        ("running", pa.float64()),
        ("waiting", pa.float64()),
        ("kv_usage_ratio", pa.float64()),
        ("prefix_hit_tokens_total", pa.float64()),
        ("prefix_query_tokens_total", pa.float64()),
    ]
)


class FleetLog:
    """Scrapes the engines once a second until it is left."""

    def __init__(self, engines: Sequence[EngineHandle], run: Run) -> None:
        self.rows: list[FleetRow] = []
        self._run = run
        targets = tuple(TargetConfig(name=engine.name, url=f"{engine.url}/metrics") for engine in engines)
        self._targets: list[Target] = []
        if targets:
            settings = ExporterConfig(targets=targets, interval_seconds=_INTERVAL_SECONDS)
            catalogue = shipped_catalogue()
            self._targets = [Target(target, settings, catalogue) for target in targets]
            self._timeout_seconds, self._limit_bytes = settings.timeout_seconds, settings.limits.body_bytes

    @classmethod
    @contextlib.asynccontextmanager
    async def following(cls, engines: Sequence[EngineHandle], run: Run) -> AsyncIterator[FleetLog]:
        log = cls(engines, run)
        task = asyncio.create_task(log._follow()) if log._targets else None
        try:
            yield log
        finally:
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _follow(self) -> None:
        scraper = Scraper(self._timeout_seconds, self._limit_bytes)
        try:
            while True:
                scrapes = await asyncio.gather(*(scraper.fetch(target.config.url) for target in self._targets))
                for target, scrape in zip(self._targets, scrapes, strict=True):
                    target.ingest(scrape, time.monotonic())
                    self.rows.append(self._row(target))
                await asyncio.sleep(_INTERVAL_SECONDS)
        finally:
            await scraper.close()

    def _row(self, target: Target) -> FleetRow:
        numbers, store = target.numbers, target.store if target.up else None
        return FleetRow(
            unix_s=time.time(),
            policy=self._run.policy,
            repeat=self._run.repeat,
            worker=target.name,
            up=target.up,
            running=numbers.running if numbers else None,
            waiting=numbers.waiting if numbers else None,
            kv_usage_ratio=numbers.kv_usage_max_ratio if numbers else None,
            prefix_hit_tokens_total=store.total("prefix_hit_tokens") if store else None,
            prefix_query_tokens_total=store.total("prefix_query_tokens") if store else None,
        )


def write_fleet(path: Path, rows: Sequence[FleetRow]) -> None:
    """Write `fleet.parquet`."""
    pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema=SCHEMA), path)
