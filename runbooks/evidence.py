"""Where a diagnosis asks: a Prometheus, or the exporter itself where there is none."""

from __future__ import annotations

import asyncio
import json
import math
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlencode

import aiohttp

from runbooks.diagnosis import Answer
from runbooks.errors import EvidenceError
from runbooks.page import Step
from runbooks.promql import QueryError, Sample, Vector, evaluate
from runbooks.snapshots import Snapshots

_TIMEOUT_SECONDS = 10.0
_LOGIN_WANTED = (401, 403)
_EXPORTERS_OWN = ("prefixwatch_target_up", "prefixwatch_discovered_targets")
"""Every exporter has one of them, also one whose discovery finds nothing."""
_AT_ONCE = 8
"""Queries in flight, so that a Prometheus in trouble isn't given all of them at a stroke."""


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
                text, status = await response.text(), response.status
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EvidenceError(self._unasked(why_unanswered(error))) from error
        if status in _LOGIN_WANTED:
            raise EvidenceError(self._unasked(_login_hint(status)))
        body = _json(text)
        if not isinstance(body, dict) or "status" not in body:
            raise EvidenceError(self._unasked(f"its answer, {status}, is not that of a Prometheus' API"))
        if body["status"] != "success":
            raise QueryError(f"{self._url} refuses {path}: {body.get('error', f'status {status}')}")
        data: dict[str, Any] = body["data"]
        return data

    def _unasked(self, why: str) -> str:
        return f"--prometheus {self._url}: can't be asked ({why}): give the address of a Prometheus, or --exporter URL"

    async def scrape_interval_seconds(self) -> float | None:
        """How often it scrapes the exporter; None where it doesn't, or doesn't tell, as those that only store don't."""
        try:
            exporters = {sample.labels.get("instance") for sample in await self.query("prefixwatch_window_seconds")}
            targets = (await self._get("targets?state=active")).get("activeTargets", [])
        except (EvidenceError, QueryError):
            return None
        found = []
        for target in targets:
            interval = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", target.get("scrapeInterval", ""))
            if target.get("labels", {}).get("instance") in exporters and interval is not None and interval[0]:
                found.append(60.0 * int(interval[1] or 0) + int(interval[2] or 0))
        return max(found, default=None)

    async def firing_alerts(self) -> list[dict[str, str]]:
        """Labels of the alerts that fire now. Raises EvidenceError, also where queries are refused altogether."""
        try:
            return [dict(sample.labels) for sample in await self.query('ALERTS{alertstate="firing"}')]
        except QueryError as error:
            raise EvidenceError(self._unasked(str(error))) from error


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
            raise EvidenceError(
                f"--exporter {url}: its metrics can't be read ({why_unanswered(error)}): start it with `prefixwatch "
                "exporter`, or give the address of a Prometheus with --prometheus"
            ) from error
    if not any(map(snapshots.named, _EXPORTERS_OWN)):
        raise EvidenceError(
            f"--exporter {url}: this page isn't prefixwatch's exporter's: it has none of {', '.join(_EXPORTERS_OWN)}"
        )
    return ExporterEvidence(base, snapshots)


async def ask_all(steps: Sequence[Step], evidence: Evidence, window: str) -> list[Answer]:
    """Every step's answer, in the steps' order. A step that gets none says why, and the others go on."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(step: Step) -> Answer:
        async with places:
            return await ask(step, evidence, window)

    return await asyncio.gather(*(one(step) for step in steps))


async def ask(step: Step, evidence: Evidence, window: str) -> Answer:
    """One step's answer: of several series the one the step reads."""
    try:
        vector = await evidence.query(step.at(window))
    except (QueryError, EvidenceError) as error:
        return Answer(None, {}, 0, str(error))
    known = [sample for sample in vector if not math.isnan(sample.value)]
    if not known:
        return Answer(None, {}, 0, "nothing measures it, or there was too little traffic")
    worst = (max if step.pick == "max" else min)(known, key=lambda sample: sample.value)
    labels = {name: value for name, value in worst.labels.items() if name not in ("__name__", "job", "instance")}
    return Answer(worst.value, labels, len(known))


def new_session(
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> aiohttp.ClientSession:
    """With the time limit that a diagnosis gives each answer; `tls` checks certificates, else the system's do."""
    connector = aiohttp.TCPConnector(ssl=tls if tls is not None else True)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)


def why_unanswered(error: Exception) -> str:
    """In words, with the option that may help."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate can't be trusted: {error.certificate_error}: give its authority's as --ca-file"
    if isinstance(error, aiohttp.ClientResponseError) and error.status in _LOGIN_WANTED:
        return _login_hint(error.status)
    return str(error) or type(error).__name__


def _login_hint(status: int) -> str:
    return f"it answers {status}: give what it wants as --header 'Authorization: Bearer ${{TOKEN}}'"


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _vector(data: dict[str, Any]) -> Vector:
    kind: str = data["resultType"]
    if kind == "scalar":
        return [Sample({}, float(data["result"][1]))]
    if kind != "vector":
        raise QueryError(f"a {kind} came where an instant vector is needed")
    elements: Sequence[dict[str, Any]] = data["result"]
    return [Sample(dict(each["metric"]), float(each["value"][1])) for each in elements]
