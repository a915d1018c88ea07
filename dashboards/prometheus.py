"""A Prometheus' HTTP API, as far as dashboards ask it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from dashboards.errors import DashboardError

_TIMEOUT_SECONDS = 30.0


class QueryRefusedError(Exception):
    """Prometheus understood the question and refuses it."""


@dataclass(frozen=True, slots=True)
class Series:
    """A series of an answer: Unix seconds and values, NaN included."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]

    @property
    def known(self) -> bool:
        """Whether any value is a number."""
        return any(not math.isnan(value) for _, value in self.points)


class Prometheus:
    """Raises DashboardError when nobody answers, QueryRefusedError for a query that is refused."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self._session = session

    async def range(self, expr: str, start: float, end: float, step_seconds: float) -> list[Series]:
        data = {"query": expr, "start": str(start), "end": str(end), "step": str(step_seconds)}
        return [_series(each, each["values"]) for each in (await self._ask("query_range", data))["result"]]

    async def instant(self, expr: str, at: float) -> list[Series]:
        found = await self._ask("query", {"query": expr, "time": str(at)})
        if found["resultType"] == "scalar":
            return [_series({"metric": {}}, [found["result"]])]
        return [_series(each, [each["value"]]) for each in found["result"]]

    async def label_values(self, selector: str, label: str, start: float, end: float) -> list[str]:
        params = {"match[]": selector, "start": str(start), "end": str(end)}
        found: list[str] = await self._ask(f"label/{label}/values", params, method="GET")
        return found

    async def scrape_intervals(self, job: str) -> set[str]:
        """How often the targets of a job are scraped; empty where Prometheus doesn't tell."""
        active = (await self._ask("targets", {"state": "active"}, method="GET"))["activeTargets"]
        return {
            each["scrapeInterval"] for each in active if each["labels"].get("job") == job and "scrapeInterval" in each
        }

    async def _ask(self, path: str, data: Mapping[str, str], method: str = "POST") -> Any:
        url, get = f"{self.url}/api/v1/{path}", method == "GET"
        params, form = (data, None) if get else (None, data)
        try:
            async with self._session.request(method, url, params=params, data=form) as response:
                body = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise DashboardError(
                f"--prometheus {self.url}: can't be asked ({why}): give the address of a running Prometheus"
            ) from error
        if not isinstance(body, dict) or body.get("status") != "success":
            problem = body.get("error", "no answer of its API") if isinstance(body, dict) else "no answer of its API"
            raise QueryRefusedError(str(problem))
        return body["data"]


def new_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS))


def _series(each: Mapping[str, Any], values: Sequence[Any]) -> Series:
    return Series(each["metric"], [(float(at), float(value)) for at, value in values])
