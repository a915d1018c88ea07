"""Where a diagnosis asks: a Prometheus, or the exporter itself where there is none."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import urlencode

import aiohttp

from runbooks.diagnosis import Answer
from runbooks.errors import EvidenceError
from runbooks.page import Step
from runbooks.promql import QueryError, Sample, Vector, evaluate
from runbooks.snapshots import Snapshots

_TIMEOUT_SECONDS = 10.0


class Evidence(Protocol):
    """Something that answers PromQL."""

    async def query(self, query: str) -> Vector:
        """An instant vector, now. Raises EvidenceError when nobody answers, QueryError for a query that is refused."""

    @property
    def describe(self) -> str:
        """Where the answers come from, for people."""


class PrometheusEvidence:
    """Instant queries at a Prometheus' HTTP API."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url.rstrip("/")
        self._session = session

    @property
    def describe(self) -> str:
        return f"Prometheus {self._url}"

    async def query(self, query: str) -> Vector:
        return _vector(await self._get(f"query?{urlencode({'query': query})}"))

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            async with self._session.get(f"{self._url}/api/v1/{path}") as response:
                body: dict[str, Any] = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise EvidenceError(
                f"--prometheus {self._url}: can't be asked ({why}): give the address of a Prometheus, or --exporter URL"
            ) from error
        if not isinstance(body, dict) or body.get("status") != "success":
            problem = body.get("error", "no answer of its API") if isinstance(body, dict) else "no answer of its API"
            raise QueryError(f"{self._url} refuses {path}: {problem}")
        data: dict[str, Any] = body["data"]
        return data

    async def scrape_interval_seconds(self) -> float | None:
        """How often it scrapes the exporter; None where it doesn't, or doesn't tell."""
        exporters = {sample.labels.get("instance") for sample in await self.query("prefixwatch_window_seconds")}
        found = []
        for target in (await self._get("targets?state=active")).get("activeTargets", []):
            interval = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", target.get("scrapeInterval", ""))
            if target.get("labels", {}).get("instance") in exporters and interval is not None and interval[0]:
                found.append(60.0 * int(interval[1] or 0) + int(interval[2] or 0))
        return max(found, default=None)

    async def firing_alerts(self) -> list[dict[str, str]]:
        """Labels of the alerts that fire now."""
        return [dict(sample.labels) for sample in await self.query('ALERTS{alertstate="firing"}')]


class ExporterEvidence:
    """The exporter's own page, read several times; `query` answers from those snapshots."""

    def __init__(self, url: str, snapshots: Snapshots) -> None:
        self._url = url
        self._snapshots = snapshots

    @property
    def describe(self) -> str:
        return f"exporter {self._url}, without a Prometheus"

    async def query(self, query: str) -> Vector:
        return evaluate(query, self._snapshots)


async def watch_exporter(
    url: str, session: aiohttp.ClientSession, *, seconds: float, pages: int = 3
) -> ExporterEvidence:
    """Read the exporter's `/metrics` this many times over so many seconds. Raises EvidenceError."""
    base = url.rstrip("/").removesuffix("/metrics")
    snapshots = Snapshots()
    for number in range(pages):
        if number:
            await asyncio.sleep(seconds / (pages - 1))
        try:
            async with session.get(f"{base}/metrics", headers={"Accept": "text/plain"}) as response:
                response.raise_for_status()
                snapshots.add_page(await response.text(), time.monotonic())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise EvidenceError(
                f"--exporter {url}: its metrics can't be read ({why}): start it with `prefixwatch exporter`, or give "
                "the address of a Prometheus with --prometheus"
            ) from error
    if not snapshots.named("prefixwatch_target_up"):
        raise EvidenceError(
            f"--exporter {url}: this page isn't prefixwatch's exporter's: it has no prefixwatch_target_up"
        )
    return ExporterEvidence(base, snapshots)


async def ask(step: Step, evidence: Evidence, window: str) -> Answer:
    """One step's answer: of several series the one the step reads. Raises EvidenceError."""
    try:
        vector = await evidence.query(step.at(window))
    except QueryError as error:
        return Answer(None, {}, 0, str(error))
    known = [sample for sample in vector if not math.isnan(sample.value)]
    if not known:
        return Answer(None, {}, 0, "nothing measures it, or there was too little traffic")
    worst = (max if step.pick == "max" else min)(known, key=lambda sample: sample.value)
    labels = {name: value for name, value in worst.labels.items() if name not in ("__name__", "job", "instance")}
    return Answer(worst.value, labels, len(known))


def new_session() -> aiohttp.ClientSession:
    """With the time limit that a diagnosis gives each answer."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS))


def _vector(data: dict[str, Any]) -> Vector:
    kind: str = data["resultType"]
    if kind == "scalar":
        return [Sample({}, float(data["result"][1]))]
    if kind != "vector":
        raise QueryError(f"a {kind} came where an instant vector is needed")
    elements: Sequence[dict[str, Any]] = data["result"]
    return [Sample(dict(each["metric"]), float(each["value"][1])) for each in elements]
