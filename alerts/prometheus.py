"""A Prometheus' HTTP API, as far as dashboards and diagnoses ask it."""

from __future__ import annotations

import json
import math
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from prefixwatch.documents.errors import InputError

TIMEOUT_SECONDS = 30.0
_LOGIN_WANTED = (401, 403)


class PrometheusError(InputError):
    """The data source can't be asked; the message names its address and the remedy."""


class QueryRefusedError(Exception):
    """Prometheus understood the question and refuses it."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer: Unix seconds and values, NaN included."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]

    @property
    def known(self) -> bool:
        """Whether any value is a number."""
        return any(not math.isnan(value) for _, value in self.points)


class Prometheus:
    """Every method raises PrometheusError when there is no usable answer, QueryRefusedError for a refused query."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self._session = session

    async def range(self, expr: str, start: float, end: float, step_seconds: float) -> list[Series]:
        form = {"query": expr, "start": str(start), "end": str(end), "step": str(step_seconds)}
        return [_series(each, each["values"]) for each in (await self._ask("query_range", form=form))["result"]]

    async def instant(self, expr: str, at: float | None = None) -> list[Series]:
        """At a time in Unix seconds; None: now."""
        form = {"query": expr} if at is None else {"query": expr, "time": str(at)}
        found = await self._ask("query", form=form)
        if found["resultType"] == "scalar":
            return [_series({"metric": {}}, [found["result"]])]
        if found["resultType"] != "vector":
            raise QueryRefusedError(f"{self.url} returns a {found['resultType']} where an instant vector is needed")
        return [_series(each, [each["value"]]) for each in found["result"]]

    async def raw(self, selector: str, seconds: float, at: float) -> list[Series]:
        """The samples as they were scraped in the `seconds` before a time in Unix seconds."""
        form = {"query": f"{selector}[{max(1, round(1000 * seconds))}ms]", "time": str(at)}
        found = await self._ask("query", form=form)
        if found["resultType"] != "matrix":
            raise QueryRefusedError(f"{self.url} returns a {found['resultType']} where raw samples are needed")
        return [_series(each, each["values"]) for each in found["result"]]

    async def clock_skew_seconds(self) -> float | None:
        """How far its clock is ahead of ours, to a second; None where its answers have no date."""
        try:
            async with self._session.get(f"{self.url}/api/v1/query", params={"query": "1"}) as response:
                date = response.headers.get("Date")
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise PrometheusError(self._unasked(why_unanswered(error))) from error
        try:
            return None if date is None else parsedate_to_datetime(date).timestamp() - time.time()
        except ValueError:
            return None

    async def label_values(self, selector: str, label: str, start: float, end: float) -> list[str]:
        params = {"match[]": selector, "start": str(start), "end": str(end)}
        found: list[str] = await self._ask(f"label/{label}/values", params=params)
        return found

    async def active_targets(self) -> list[dict[str, Any]]:
        """What it scrapes; empty for a store that only keeps series."""
        found: dict[str, Any] = await self._ask("targets", params={"state": "active"})
        return list(found.get("activeTargets", []))

    async def retention(self) -> str:
        """How long it keeps samples, in its own words: `15d`, `15d or 10GiB`; empty for a store that doesn't say."""
        try:
            found: dict[str, Any] = await self._ask("status/runtimeinfo")
        except (PrometheusError, QueryRefusedError):
            return ""
        return str(found.get("storageRetention", ""))

    async def _ask(
        self, path: str, *, params: Mapping[str, str] | None = None, form: Mapping[str, str] | None = None
    ) -> Any:
        method = "GET" if form is None else "POST"
        try:
            async with self._session.request(method, f"{self.url}/api/v1/{path}", params=params, data=form) as response:
                text, status = await response.text(), response.status
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise PrometheusError(self._unasked(why_unanswered(error))) from error
        if status in _LOGIN_WANTED:
            raise PrometheusError(self._unasked(_login_hint(status)))
        body = _json(text)
        if not isinstance(body, dict) or "status" not in body:
            raise PrometheusError(self._unasked(f"its answer, {status}, is not that of a Prometheus' API"))
        if body["status"] != "success":
            raise QueryRefusedError(str(body.get("error", f"status {status}")))
        return body["data"]

    def _unasked(self, why: str) -> str:
        return f"--prometheus {self.url}: can't be asked ({why}): give the address of a running Prometheus"


def new_session(
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> aiohttp.ClientSession:
    """Return a session whose requests carry `headers`; `tls` checks certificates, else the system's do."""
    connector = aiohttp.TCPConnector(ssl=tls if tls is not None else True)
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)


def why_unanswered(error: Exception) -> str:
    """Return the reason in words, with the option that may help."""
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


def _series(each: Mapping[str, Any], values: Sequence[Any]) -> Series:
    return Series(each["metric"], [(float(at), float(value)) for at, value in values])
