"""Requests judged by the SLO documents, as the load test's grader judges them.

Goodput is what a document with `prefixwatch.dev/all-of` joins; without one among the objectives, all of them together.
An objective takes a request that its class and selection cover. A figure that a completed request hasn't (TTFT of an
answer that wasn't streamed, TPOT of one token) excludes it; one that never completed is bad without it. Whatever didn't
complete is bad for goodput: refused, failed, timed out, and, as the grader counts them, rejected and disconnected too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric

from prefixwatch.exporters.requests.counts import UNMEASURED
from prefixwatch.exporters.requests.request import DEFAULT_CLASS, Identity, Request
from prefixwatch.exporters.requests.tally import RecentShare, Tally
from prefixwatch.kvcache.cache_class import UNKNOWN
from prefixwatch.slo.objective import Objective, RequestField
from prefixwatch.slo.selection import RequestFacts

GOOD, BAD = "good", "bad"


class Goodput:
    """Good and bad requests by objective, and those that met all of theirs, by class."""

    def __init__(self, objectives: Sequence[Objective], window_seconds: float = 60.0) -> None:
        self.recent: defaultdict[Identity, RecentShare] = defaultdict(lambda: RecentShare(window_seconds))
        """Of the window's requests whose times are known, those that met every objective of theirs."""
        self._objectives = objectives
        joined = [objective for objective in objectives if len(objective.conditions) > 1]
        self._decisive = {objective.name for objective in joined or objectives}
        self._timed = any(
            condition.field is not RequestField.COMPLETED
            for objective in objectives
            if objective.name in self._decisive
            for condition in objective.conditions
        )
        self._slo = Tally("slo_requests")
        self._requests = Tally("goodput_requests")
        self._tokens = Tally("goodput_tokens")
        self._excluded: Counter[str] = Counter()
        self._begun: set[tuple[Identity, str]] = set()

    def begin(self, identity: Identity, request_class: str = DEFAULT_CLASS) -> None:
        """Verdicts and good requests count from 0."""
        if (identity, request_class) not in self._begun:
            self._begun.add((identity, request_class))
            self._requests.add(0, *identity, request_class)
            self._tokens.add(0, *identity, request_class)
            for objective in self._objectives:
                for verdict in (GOOD, BAD):
                    self._slo.add(0, *identity, objective.name, verdict)

    def record(self, request: Request) -> None:
        record, identity = request.record, request.identity
        self.begin(identity, request.request_class)
        figures: dict[RequestField, float | None] = {
            RequestField.TTFT_SECONDS: record.ttft_seconds,
            RequestField.TPOT_SECONDS: record.tpot_seconds,
            RequestField.E2E_SECONDS: record.e2e_seconds if request.completed else None,
            RequestField.COMPLETED: float(request.completed),
            RequestField.HIT_RATIO: _hit_ratio(request),
        }
        facts = RequestFacts(
            request_class=request.request_class,
            tenant=record.tenant,
            prompt_tokens=record.prompt_tokens,
            cache=None if request.cache == UNKNOWN else request.cache,
            turn=request.turn,
        )
        good = request.completed
        for objective in self._objectives:
            if not objective.selects(facts):
                continue
            verdict = objective.verdict(figures)
            if verdict is None:
                self._excluded[objective.name] += 1
                continue
            self._slo.add(1, *identity, objective.name, GOOD if verdict else BAD)
            good = good and (verdict or objective.name not in self._decisive)
        if not request.completed or not UNMEASURED["goodput"](request) or not self._timed:
            self.recent[identity].add(request.at_seconds, counts=good)
        if good:
            self._requests.add(1, *identity, request.request_class)
            self._tokens.add(record.output_tokens or 0, *identity, request.request_class)

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        yield self._slo.metric()
        yield self._requests.metric()
        yield self._tokens.metric()

    def document(self) -> Mapping[str, Any]:
        return {
            objective.name: {
                "rule": objective.rule,
                GOOD: self._slo.total(objective.name, GOOD),
                BAD: self._slo.total(objective.name, BAD),
                "excluded": self._excluded[objective.name],
            }
            for objective in self._objectives
        }


def _hit_ratio(request: Request) -> float | None:
    """Cached over all prompt tokens; None where either isn't known."""
    prompt = request.record.prompt_tokens
    return request.cached_tokens / prompt if request.cached_tokens is not None and prompt else None
