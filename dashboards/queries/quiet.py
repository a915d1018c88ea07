"""Queries that have no answer since nothing was sent, or not for long: those that had one before are listed, and those
that may yet get one are early.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from prefixwatch.alerts.prometheus import Prometheus, QueryRefusedError
from prefixwatch.dashboards.queries.check import AT_ONCE, Outcome, answers
from prefixwatch.dashboards.queries.inventory import Shown

LOOK_BACK_SECONDS = 86_400.0
STEP_SECONDS = 60.0
TRAFFIC = ("prefixwatch_requests_total", "prefixwatch_prefix_query_tokens_total")
"""What counts it: requests where their records are read, else the engines' prompt tokens, which probes raise, too."""


FILLED_SECONDS = 600.0
"""Of traffic after which every panel that can have data has some: `prefixwatch up --traffic 2` fills all by then."""
_EVALUATED_SECONDS = 180.0
"""Within which every group of the rules was evaluated once: the longest interval is 2 min."""
_SCRAPED = "prefixwatch_target_up"
_RULES = 'ALERTS{alertname="Watchdog"}'
_NOT_SCRAPED = (
    f"there is no series {_SCRAPED} in the last day: have this Prometheus scrape the exporter (or load the rules of "
    "`prefixwatch slo build --from engines`)"
)
_NO_RULES = "no rule was evaluated in the last day: load what `prefixwatch slo build` writes as rule_files"


async def judged(
    prometheus: Prometheus, shown: Shown, outcomes: Sequence[Outcome], now: float
) -> tuple[Sequence[Outcome], list[str]]:
    """The outcomes, those that are empty held against when requests ended, and what to do or to wait for.

    Nothing is excused without the exporter's series or the rules. Raises PrometheusError.
    """
    if all(one.status != "empty" for one in outcomes):
        return outcomes, []
    scraped = await _since(prometheus, f"count({_SCRAPED})", now)
    if scraped is None:
        return outcomes, [_NOT_SCRAPED]
    if now - scraped > _EVALUATED_SECONDS and await _since(prometheus, f"count({_RULES})", now) is None:
        return outcomes, [_NO_RULES]
    minutes = round(FILLED_SECONDS / 60)
    ended = await requests_ended(prometheus, shown, now)
    if ended is None:
        why = f"no request ended in the last day: send traffic, and check again after {minutes} minutes of it"
    elif now - ended.first < FILLED_SECONDS:
        why = (
            f"requests end since {_clock(ended.first)}, {(now - ended.first) / 60:.0f} min ago, and panels may need "
            f"{minutes} minutes of them: keep traffic up, and check again at {_clock(ended.first + FILLED_SECONDS)}"
        )
    elif ended.last == now:
        return outcomes, []
    else:
        return await with_traffic(prometheus, shown, outcomes, ended.last), []
    early = [replace(one, status="early") if one.status == "empty" else one for one in outcomes]
    return early, [f"not enough data yet: {why}"]


async def _since(prometheus: Prometheus, expr: str, now: float) -> float | None:
    """When the expression first had a value in the last `LOOK_BACK_SECONDS`, Unix seconds; None: never."""
    found = await prometheus.range(expr, now - LOOK_BACK_SECONDS, now, STEP_SECONDS)
    return min((at for series in found for at, _ in series.points), default=None)


@dataclass(frozen=True, slots=True)
class Ended:
    """When requests first and last ended, Unix seconds to a minute."""

    first: float
    last: float


async def requests_ended(prometheus: Prometheus, shown: Shown, now: float) -> Ended | None:
    """When in the last `LOOK_BACK_SECONDS`; the last is `now` while they do; None: never. Raises PrometheusError."""
    window = max(STEP_SECONDS, 4 * shown.scrape_seconds)
    for counter in TRAFFIC:
        expr = f"sum(rate({counter}[{round(window)}s]))"
        try:
            found = await prometheus.range(expr, now - LOOK_BACK_SECONDS, now, STEP_SECONDS)
        except QueryRefusedError:  # nobody can say: nothing is excused
            return Ended(now - LOOK_BACK_SECONDS, now)
        points = [point for series in found for point in series.points]
        if points:
            ended = [at for at, rate in points if rate > 0]
            if not ended:
                return None
            return Ended(min(ended), now if now - max(ended) < STEP_SECONDS else max(ended))
    return None


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S UTC")


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
