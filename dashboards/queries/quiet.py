"""Queries that have no answer since nothing was sent: they are asked again about the time in which something was."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from prefixwatch.alerts.prometheus import Prometheus, QueryRefusedError
from prefixwatch.dashboards.queries.check import AT_ONCE, Outcome, answers
from prefixwatch.dashboards.queries.inventory import Shown

LOOK_BACK_SECONDS = 86_400.0
STEP_SECONDS = 60.0
TRAFFIC = ("prefixwatch_requests_total", "prefixwatch_prefix_query_tokens_total")
"""What counts it: requests where their records are read, else the engines' prompt tokens, which probes raise, too."""


async def last_traffic(prometheus: Prometheus, shown: Shown, now: float) -> float | None:
    """When requests last ended, Unix seconds to a minute; `now` while they do, or where nobody can say; None: not in
    the last `LOOK_BACK_SECONDS`. Raises PrometheusError."""
    window = max(STEP_SECONDS, 4 * shown.scrape_seconds)
    for counter in TRAFFIC:
        expr = f"sum(rate({counter}[{round(window)}s]))"
        try:
            found = await prometheus.range(expr, now - LOOK_BACK_SECONDS, now, STEP_SECONDS)
        except QueryRefusedError:
            return now
        points = [point for series in found for point in series.points]
        if points:
            last = max((at for at, rate in points if rate > 0), default=None)
            return now if last is not None and now - last < STEP_SECONDS else last
    return None


async def with_traffic(prometheus: Prometheus, shown: Shown, outcomes: Sequence[Outcome], last: float) -> list[Outcome]:
    """The outcomes, those listed that are empty now and had an answer in the time range up to the `last` request.

    A series that was renamed had none then, either. Raises PrometheusError.
    """
    gate = asyncio.Semaphore(AT_ONCE)
    when = datetime.fromtimestamp(last, UTC).strftime("%Y-%m-%d %H:%M UTC")

    async def one(outcome: Outcome) -> Outcome:
        if outcome.status != "empty":
            return outcome
        try:
            async with gate:
                count = await answers(outcome.asked, prometheus, shown, last - shown.range_seconds, last, instant=False)
        except QueryRefusedError:
            return outcome
        return replace(outcome, status="listed", why=f"no request since {when}; it had data then") if count else outcome

    return list(await asyncio.gather(*map(one, outcomes)))
