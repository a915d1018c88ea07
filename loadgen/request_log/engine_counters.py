"""The engines' own hit and query counters over one run: read at its start and its end, and nothing in between.

Engines show totals since they started, or a rate over their latest requests; neither is the run's (vllm#46938, EM46).
The run's figure is the difference of two readings; there is none when a counter was reset in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from prefixwatch.documents.section import Section
from prefixwatch.loadgen.request_log.fleet_rows import FleetRow

AGREEMENT_RATIO = 0.01
"""Of the prompt tokens: how far the counters may be from the sums of what answers report."""


FOREIGN_RATIO = 0.05
"""Of a run's prompt tokens: what the engines may have looked up beyond them, as preempted requests are twice."""


class EngineCounters(Section):
    """Sums over all engines, prime and warm-up requests included."""

    start_hit_tokens: float | None
    start_query_tokens: float | None
    end_hit_tokens: float | None
    end_query_tokens: float | None
    hit_tokens: float | None = Field(description="end - start; null when that says nothing: see reason")
    query_tokens: float | None
    hit_ratio: float | None = Field(description="hit_tokens / query_tokens of this run alone")
    reason: str = Field(default="", description="why the run's figures are null; empty when they aren't")


def engine_counters(rows: Iterable[FleetRow]) -> EngineCounters | None:
    """Of one run's rows, from the first and the last of each worker; None where no engine was read."""
    workers: dict[str, list[FleetRow]] = {}
    for row in rows:
        workers.setdefault(row.worker, []).append(row)
    if not workers:
        return None
    first, last = ([own[place] for own in workers.values()] for place in (0, -1))
    start_hits, start_queries = _sum(first, "prefix_hit_tokens_total"), _sum(first, "prefix_query_tokens_total")
    end_hits, end_queries = _sum(last, "prefix_hit_tokens_total"), _sum(last, "prefix_query_tokens_total")
    reason = _why_not(workers)
    hits = None if reason or start_hits is None or end_hits is None else end_hits - start_hits
    queries = None if reason or start_queries is None or end_queries is None else end_queries - start_queries
    return EngineCounters(
        start_hit_tokens=start_hits,
        start_query_tokens=start_queries,
        end_hit_tokens=end_hits,
        end_query_tokens=end_queries,
        hit_tokens=hits,
        query_tokens=queries,
        hit_ratio=hits / queries if hits is not None and queries else None,
        reason=reason,
    )


def disagreement(counters: EngineCounters, log: pa.Table) -> str | None:
    """Where the engines' counters and what answers report of the same run say different things; None where not.

    Nothing is said of a run in which an answer lacks the figures: its tokens are counted there and not here.
    """
    sent = log.filter(pc.is_valid(log["sent_s"]))
    if not len(sent) or sent["cached_tokens"].null_count or sent["prompt_tokens"].null_count:
        return None
    hits, queries = pc.sum(sent["cached_tokens"]).as_py(), pc.sum(sent["prompt_tokens"]).as_py()
    if counters.hit_tokens is None or counters.query_tokens is None:
        return None
    if max(abs(counters.hit_tokens - hits), abs(counters.query_tokens - queries)) <= AGREEMENT_RATIO * queries:
        return None
    return (
        f"the engines counted {counters.hit_tokens:,.0f} hit tokens of {counters.query_tokens:,.0f} queried, the "
        f"answers report {hits:,} of {queries:,}: others use these engines too, or they count requests twice that they "
        "preempted"
    )


def foreign_traffic(counters: EngineCounters, log: pa.Table) -> str | None:
    """Why a run isn't alone on its engines; None where it is, or where they don't say.

    `log` is the run's. A request without usage counts with its planned length: it may have been computed.
    """
    sent = log.filter(pc.is_valid(log["sent_s"]))
    own = pc.sum(pc.coalesce(sent["prompt_tokens"], sent["planned_prompt_tokens"])).as_py() or 0
    if counters.query_tokens is None or counters.query_tokens <= (1 + FOREIGN_RATIO) * own:
        return None
    return (
        f"others used these engines during the run: the engines looked up {counters.query_tokens:,.0f} prompt tokens, "
        f"this run sent {own:,}: repeat it when nobody else sends, or on engines of its own"
    )


def _why_not(workers: dict[str, list[FleetRow]]) -> str:
    for name, rows in workers.items():
        for earlier, later in pairwise(rows):
            if later.counter_resets > earlier.counter_resets or _fell(earlier, later):
                return f"{name}'s counters were reset during the run: it was restarted, or its metrics were reset"
        if not (rows[0].up and rows[-1].up):
            return f"{name} gave no metrics at the run's start or end"
        if rows[0].prefix_query_tokens_total is None or rows[-1].prefix_query_tokens_total is None:
            return f"{name} has no counters of prefix hits and queries"
    return ""


def _fell(earlier: FleetRow, later: FleetRow) -> bool:
    before, after = earlier.prefix_query_tokens_total, later.prefix_query_tokens_total
    return before is not None and after is not None and after < before


def _sum(rows: Sequence[FleetRow], name: str) -> float | None:
    values = [getattr(row, name) for row in rows]
    return None if None in values else float(sum(values))
