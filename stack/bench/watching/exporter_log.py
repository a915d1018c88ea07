"""The workers behind a target while a run goes on, as a running exporter sees them: rows of `fleet.parquet`.

The exporter scrapes at its own interval. So that the engines' counters span the run, the first reading waits for a
scrape that is newer than its beginning, and the last one for a scrape that is newer than its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from prefixwatch.loadgen.request_log.fleet_rows import FleetRow
from prefixwatch.stack.bench.schedule import Run
from prefixwatch.stack.errors import UsageError

_INTERVAL_SECONDS = 1.0
_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
FRESH_SECONDS = 75.0
"""How long to wait for a new scrape: more than an exporter's usual interval, 15 s, and Prometheus' 60 s."""


class ExporterLog:
    """Reads `/api/v1/fleet` once a second."""

    def __init__(self, url: str, run: Run, session: aiohttp.ClientSession) -> None:
        self._url = f"{url.rstrip('/')}/api/v1/fleet"
        self._run = run
        self._session = session
        self.rows: list[FleetRow] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def following(cls, url: str, run: Run) -> AsyncIterator[list[FleetRow]]:
        """The rows, which grow meanwhile. Raises UsageError for an address that isn't an exporter with engines."""
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            log = cls(url, run, session)
            await log._read_fresh()
            follower = asyncio.create_task(log._follow())
            try:
                yield log.rows
            finally:
                follower.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await follower
            await log._read_fresh()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            with contextlib.suppress(UsageError):  # one reading is missing; the last one must work
                self._add(await self._engines())

    async def _read_fresh(self) -> None:
        """A reading whose scrapes are all newer than now."""
        begun = time.monotonic()
        while True:
            engines = await self._engines()
            waited = time.monotonic() - begun
            ages = [target["scrape"].get("age_seconds", 0.0) for target in engines if target["up"]]
            if all(age < waited for age in ages) or waited > FRESH_SECONDS:
                self._add(engines)
                return
            await asyncio.sleep(_INTERVAL_SECONDS / 2)

    async def _engines(self) -> list[Mapping[str, Any]]:
        where = f"--exporter: {self._url}"
        try:
            async with self._session.get(self._url) as response:
                if response.status != 200:
                    raise UsageError(f"{where} answers {response.status}: is it a prefixwatch exporter?")
                document = await response.json(content_type=None)
            engines = [target for target in document["targets"] if target["role"] == "engine"]
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{where} can't be read ({error}): start it, or correct the address") from error
        if not engines:
            raise UsageError(f"{where} lists no engine: give the exporter the engines behind the target")
        return engines

    def _add(self, engines: list[Mapping[str, Any]]) -> None:
        self.rows += [fleet_row(target, self._run, time.time()) for target in engines]


def fleet_row(target: Mapping[str, Any], run: Run, unix_s: float) -> FleetRow:
    """One of the document's targets as a row, at the time of its scrape."""
    derived = target["derived"]
    return FleetRow(
        unix_s=unix_s - target["scrape"].get("age_seconds", 0.0),
        policy=run.policy,
        repeat=run.repeat,
        worker=target["name"],
        up=target["up"],
        running=_total(target, "running_requests"),
        waiting=_total(target, "waiting_requests"),
        kv_usage_ratio=derived.get("kv_usage_max_ratio"),
        prefix_hit_tokens_total=_total(target, "prefix_hit_tokens"),
        prefix_query_tokens_total=_total(target, "prefix_query_tokens"),
        kv_blocks_removed_total=derived.get("kv_blocks_evicted"),
    )


def _total(target: Mapping[str, Any], signal: str) -> float | None:
    found = target["signals"].get(signal)
    return None if found is None else float(sum(series["value"] for series in found["series"]))
