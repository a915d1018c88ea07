"""Requests judged by the SLO documents, as the load test's grader judges them.

Goodput is what a document with `prefixwatch.dev/all-of` joins; without one among the objectives, all of them together.
An objective takes a request that its class and selection cover. A figure that a completed request hasn't (TTFT of an
answer that wasn't streamed, TPOT of one token) excludes it; one that never completed is bad without it. Whatever didn't
complete is bad for goodput: refused, failed, timed out, and, as the grader counts them, rejected and disconnected too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric

from exporters.requests.seen import DEFAULT_CLASS, SeenRequest
from exporters.requests.tally import Tally
from kvcache.cache_class import UNKNOWN
from slo.objective import Objective, RequestField
from slo.selection import RequestFacts

GOOD, BAD = "good", "bad"


class Goodput:
    """Good and bad requests by objective, and those that met all of theirs, by class."""

    def __init__(self, objectives: Sequence[Objective]) -> None:
        self._objectives = objectives
        joined = [objective for objective in objectives if len(objective.conditions) > 1]
        self._decisive = {objective.name for objective in joined or objectives}
        self._slo = Tally("slo_requests")
        self._requests = Tally("goodput_requests")
        self._tokens = Tally("goodput_tokens")
        self._excluded: Counter[str] = Counter()
        for objective in objectives:
            for verdict in (GOOD, BAD):
                self._slo.add(0, objective.name, verdict)
        self._begin_class(DEFAULT_CLASS)

    def record(self, seen: SeenRequest) -> None:
        record = seen.record
        figures: dict[RequestField, float | None] = {
            RequestField.TTFT_SECONDS: record.ttft_seconds,
            RequestField.TPOT_SECONDS: record.tpot_seconds,
            RequestField.E2E_SECONDS: record.e2e_seconds if seen.completed else None,
            RequestField.COMPLETED: float(seen.completed),
            RequestField.HIT_RATIO: _hit_ratio(seen),
        }
        facts = RequestFacts(
            request_class=seen.request_class,
            tenant=record.tenant,
            prompt_tokens=record.prompt_tokens,
            cache=None if seen.cache == UNKNOWN else seen.cache,
            turn=seen.turn,
        )
        good = seen.completed
        for objective in self._objectives:
            if not objective.selects(facts):
                continue
            verdict = objective.verdict(figures)
            if verdict is None:
                self._excluded[objective.name] += 1
                continue
            self._slo.add(1, objective.name, GOOD if verdict else BAD)
            good = good and (verdict or objective.name not in self._decisive)
        self._begin_class(seen.request_class)
        if good:
            self._requests.add(1, seen.request_class)
            self._tokens.add(record.output_tokens or 0, seen.request_class)

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        yield self._slo.metric()
        yield self._requests.metric()
        yield self._tokens.metric()

    def document(self) -> Mapping[str, Any]:
        return {
            objective.name: {
                "rule": objective.rule,
                GOOD: self._slo.value(objective.name, GOOD),
                BAD: self._slo.value(objective.name, BAD),
                "excluded": self._excluded[objective.name],
            }
            for objective in self._objectives
        }

    def _begin_class(self, name: str) -> None:
        self._requests.add(0, name)
        self._tokens.add(0, name)


def _hit_ratio(seen: SeenRequest) -> float | None:
    """Cached over all prompt tokens; None where either isn't known."""
    prompt = seen.record.prompt_tokens
    return seen.cached_tokens / prompt if seen.cached_tokens is not None and prompt else None
