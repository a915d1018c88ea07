"""Findings of broken isolation: counted by kind and certainty, the latest kept with the requests that show them.

The router says in each record what the request shows (`kvcache.isolation_findings`). Whether a reuse is certainly
another tenant's is decided in `isolation.verdicts`, and whether first tokens come too soon here: by the sequential test
of `kvcache.fast_first_tokens`, one for each model and place.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prefixwatch.exporters.isolation.serving_tiers import TIERS, UNKNOWN
from prefixwatch.exporters.isolation.tenant_routes import CERTAIN, PENDING
from prefixwatch.exporters.requests.request import Identity, Request
from prefixwatch.exporters.requests.tally import Tally
from prefixwatch.kvcache.fast_first_tokens import FastFirstTokens
from prefixwatch.kvcache.isolation_findings import ANOTHER_TENANT, NOBODY, FindingKind

PROVEN, UNPROVEN, CONFIGURATION, STATISTICAL = "certain", "unproven", "configuration", "statistical"
"""The certainty of a finding."""
SALT_KINDS = (FindingKind.SALT_REUSED, FindingKind.TENANT_WITHOUT_SALT, FindingKind.SALT_PER_REQUEST)
"""What salts show by themselves."""
REUSE_KINDS = (
    FindingKind.CROSS_TENANT_HIT,
    FindingKind.SALT_IGNORED,
    FindingKind.SALT_REUSED,
    FindingKind.TENANT_WITHOUT_SALT,
)

_SHOWN = 32
_WAITING = 10_000
_Key = tuple[str, ...]


@dataclass(slots=True)
class _Shown:
    """The latest request of a finding, what shows it, and how many there were."""

    request: Request
    evidence: tuple[str, ...]
    requests: int


class Findings:
    """Counts in `tally`, and the latest findings with their evidence."""

    def __init__(self) -> None:
        self.tally = Tally("isolation_findings")
        self._shown: OrderedDict[_Key, _Shown] = OrderedDict()

    def judged(
        self, identity: Identity, kinds: Iterable[FindingKind], certainty: str, tiers: Iterable[str] = (UNKNOWN,)
    ) -> None:
        """Requests could be judged for these kinds: their counts begin at 0."""
        for kind in kinds:
            for tier in tiers:
                self.tally.add(0, *identity, kind, certainty, tier)

    def judged_for_reuse(self, identity: Identity) -> None:
        self.judged(identity, REUSE_KINDS, PROVEN, TIERS)

    def add(
        self,
        request: Request,
        kind: str,
        certainty: str,
        tier: str = UNKNOWN,
        *,
        other: str | None = None,
        evidence: tuple[str, ...] | None = None,
    ) -> None:
        """`other` tenant and `evidence` are the record's own where none are given."""
        self.tally.add(1, *request.identity, kind, certainty, tier)
        if certainty == UNPROVEN:
            return  # several routers that share workers have these in the best of health
        record = request.record
        other = record.finding_tenant if other is None else other
        evidence = record.finding_requests if evidence is None else evidence
        key = certainty, kind, record.model, record.tenant, other, tier
        before = self._shown.pop(key, None)
        self._shown[key] = _Shown(request, evidence, before.requests + 1 if before else 1)
        if len(self._shown) > _SHOWN:
            del self._shown[next((key for key in self._shown if key[0] != PROVEN), next(iter(self._shown)))]

    def latest(self) -> list[Mapping[str, Any]]:
        """The newest first; one entry per kind, model, pair of tenants and tier."""
        return [
            {
                "kind": kind,
                "certainty": certainty,
                "model": model,
                "tenant": tenant,
                "tier": tier,
                **({"other_tenant": other} if other else {}),
                "requests": shown.requests,
                "worker": shown.request.record.worker,
                "ended_unix_seconds": shown.request.record.ended_unix_seconds,
                "evidence": list(shown.evidence),
            }
            for (certainty, kind, model, tenant, other, tier), shown in reversed(self._shown.items())
        ]


class ColdPrompts:
    """First tokens of prompts that are cold for their tenant, tested once it is certain that they are.

    `prove`: as `TenantRoutes.prove`. `alarm` gets the request that completes the evidence.
    """

    def __init__(
        self, prove: Callable[[Request], str], tested: Callable[[Request], None], alarm: Callable[[Request], None]
    ) -> None:
        self._prove, self._tested, self._alarm = prove, tested, alarm
        self._tests: dict[Identity, FastFirstTokens] = {}
        self._waiting: deque[tuple[Request, float]] = deque(maxlen=_WAITING)

    def record(self, request: Request) -> None:
        record = request.record
        seconds, tokens = record.ttft_seconds, record.prompt_tokens
        if seconds is None or tokens is None or record.own_tokens != 0 or request.cached_tokens or record.retries:
            return
        if record.opening_sent_by not in (NOBODY, ANOTHER_TENANT):
            return
        test = self._tests.setdefault(request.identity, FastFirstTokens())
        if record.opening_sent_by == NOBODY:
            test.reference(record.worker, tokens, seconds)
        elif (rank := test.rank(record.worker, tokens, seconds)) is not None:
            self._judge(request, rank)

    def settle(self) -> None:
        """Judge those that had to wait for other routers' records."""
        for _ in range(len(self._waiting)):
            self._judge(*self._waiting.popleft())

    def _judge(self, request: Request, rank: float) -> None:
        verdict = self._prove(request)
        if verdict == PENDING:
            self._waiting.append((request, rank))
        elif verdict == CERTAIN:
            self._tested(request)
            if self._tests[request.identity].stake(rank):
                self._alarm(request)
