"""Where a diagnosis asks: a Prometheus, or the exporter itself where there is none."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Protocol

import aiohttp

from prefixwatch.alerts.prometheus import Prometheus, PrometheusError, QueryRefusedError, why_unanswered
from prefixwatch.documents import durations
from prefixwatch.runbooks.diagnosis import Answer
from prefixwatch.runbooks.page import BEFORE, Step, at
from prefixwatch.runbooks.promql import Sample, Vector, evaluate
from prefixwatch.runbooks.snapshots import Snapshots
from prefixwatch.slo.promql import QueryError

TIMEOUT_SECONDS = 10.0
_EXPORTERS_OWN = ("prefixwatch_target_up", "prefixwatch_discovered_targets")
"""Every exporter has one of them, also one whose discovery finds nothing."""
_AT_ONCE = 8
"""Queries in flight, so that a Prometheus in trouble isn't given all of them at once."""
_PAGES = 3
_NO_HISTORY = "compares with earlier minutes: needs --prometheus"


class Evidence(Protocol):
    """A source that can be asked PromQL."""

    history: bool
    """Whether it knows more than the time that is looked at."""

    async def query(self, query: str) -> Vector:
        """An instant vector, now. Raises PrometheusError without an answer, QueryError for a refused query."""

    @property
    def describe(self) -> str:
        """Where the answers come from, for people."""


class PrometheusEvidence:
    """Instant queries at a Prometheus' HTTP API."""

    history = True

    def __init__(self, url: str, session: aiohttp.ClientSession, at_unix_seconds: float | None = None) -> None:
        """`at_unix_seconds`: the moment that queries are about; None: now."""
        self._prometheus = Prometheus(url, session)
        self._at = at_unix_seconds

    @property
    def describe(self) -> str:
        return f"Prometheus {self._prometheus.url}"

    async def query(self, query: str) -> Vector:
        try:
            found = await self._prometheus.instant(query, self._at)
        except QueryRefusedError as error:
            raise QueryError(f"{self._prometheus.url} refuses the query: {error}") from error
        return [Sample(dict(series.labels), series.points[0][1]) for series in found]

    async def scrape_interval_seconds(self) -> float | None:
        """How often it scrapes the exporter; None where it doesn't, or doesn't say, as stores without targets don't."""
        try:
            exporters = {sample.labels.get("instance") for sample in await self.query("prefixwatch_window_seconds")}
            found = [
                durations.seconds(target["scrapeInterval"])
                for target in await self._prometheus.active_targets()
                if target.get("labels", {}).get("instance") in exporters and target.get("scrapeInterval")
            ]
        except (PrometheusError, QueryError, QueryRefusedError, ValueError):
            return None
        return max(found, default=None)

    async def firing_alerts(self) -> list[dict[str, str]]:
        """Labels of the alerts that fire now. Raises PrometheusError, also where queries are refused altogether."""
        try:
            return [dict(sample.labels) for sample in await self.query('ALERTS{alertstate="firing"}')]
        except QueryError as error:
            raise PrometheusError(f"--prometheus {self._prometheus.url}: can't be asked ({error})") from error


class ExporterEvidence:
    """The exporter's own page, read several times; `query` answers from those snapshots."""

    history = False

    def __init__(self, url: str, snapshots: Snapshots) -> None:
        self._url = url
        self._snapshots = snapshots

    @property
    def describe(self) -> str:
        return f"exporter {self._url}, without a Prometheus"

    async def query(self, query: str) -> Vector:
        return evaluate(query, self._snapshots)


async def watch_exporter(url: str, session: aiohttp.ClientSession, *, seconds: float) -> ExporterEvidence:
    """Read the exporter's `/metrics` three times over this time. Raises PrometheusError."""
    base = url.rstrip("/").removesuffix("/metrics")
    snapshots = Snapshots()
    for number in range(_PAGES):
        if number:
            await asyncio.sleep(seconds / (_PAGES - 1))
        try:
            async with session.get(f"{base}/metrics", headers={"Accept": "text/plain"}) as response:
                response.raise_for_status()
                snapshots.add_page(await response.text(), time.monotonic())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise PrometheusError(
                f"--exporter {url}: its metrics can't be read ({why_unanswered(error)}): start it with `prefixwatch "
                "exporter`, or give the address of a Prometheus with --prometheus"
            ) from error
    if not any(map(snapshots.named, _EXPORTERS_OWN)):
        raise PrometheusError(
            f"--exporter {url}: this page isn't prefixwatch's exporter's: it has none of {', '.join(_EXPORTERS_OWN)}"
        )
    return ExporterEvidence(base, snapshots)


async def ask_all(steps: Sequence[Step], evidence: Evidence, window: str) -> list[Answer]:
    """Every step's answer, in the steps' order. A step without one says why, and the others go on."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(step: Step) -> Answer:
        async with places:
            return await ask(step, evidence, window)

    return await asyncio.gather(*(one(step) for step in steps))


async def ask(step: Step, evidence: Evidence, window: str) -> Answer:
    """One step's answer: every series with a number."""
    why = "nothing measures it, or there was too little traffic"
    for by, query in step.queries:
        if BEFORE in query and not evidence.history:
            return Answer((), _NO_HISTORY, failed=True)
        try:
            vector = await evidence.query(at(query, window))
        except (QueryError, PrometheusError) as error:
            return Answer((), str(error), failed=True)
        known = tuple(sample for sample in vector if not math.isnan(sample.value))
        if known:
            return Answer(known, by=by)
    return Answer((), why)
