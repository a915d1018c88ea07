"""Reuse across tenants, judged from request records.

* `cross_tenant_hit`: the engine reused at least a block beyond all that the tenant had ever sent or been answered, and
  no other router can have warmed the worker with this tenant's prompts (`isolation.tenant_routes`). Certain.
* `unsalted_traffic`: a named tenant's request went to an engine without a salt, although salts are in use, or another
  tenant has used that engine. Nothing need have leaked; nothing prevented a leak.
* `fast_cold_prompt`: prompts of which their tenant had sent nothing, but another tenant had, get their first token
  sooner than those that nobody had sent. Statistical, within a budget of false alarms; one is counted per alarm.

Every completed request is either audited or counted with the reason why not. `isolation.findings` counts what
causes it and keeps the evidence.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import Metric

from prefixwatch.exporters.isolation.findings import (
    CONFIGURATION,
    PROVEN,
    SALT_KINDS,
    STATISTICAL,
    UNPROVEN,
    ColdPrompts,
    Findings,
)
from prefixwatch.exporters.isolation.serving_tiers import GPU, UNKNOWN, TierOf, unknown_tier
from prefixwatch.exporters.isolation.shared_namespaces import STORED_KINDS, SharedNamespaces, TreeNow, no_tree
from prefixwatch.exporters.isolation.tenant_routes import CERTAIN, PENDING, REASONS, UNSETTLED
from prefixwatch.exporters.metrics_page.rows import rows
from prefixwatch.exporters.requests.request import Identity, Request
from prefixwatch.exporters.requests.tally import RecentShare, Share, Tally
from prefixwatch.kvcache.isolation_findings import FindingKind
from prefixwatch.kvcache.request_record import owner

CROSS_TENANT_HIT, UNSALTED, FAST_COLD = "cross_tenant_hit", "unsalted_traffic", "fast_cold_prompt"
OWN_UNKNOWN, NO_CACHED_TOKENS = "own_unknown", "no_cached_tokens"

LEAST_AUDITED_RATIO = 0.9
WHY: Mapping[str, str] = {
    **REASONS,
    OWN_UNKNOWN: "the router doesn't know all that the tenant had sent to this worker's cache",
    NO_CACHED_TOKENS: "the engine reported no cached tokens",
}

Proof = Callable[[Request], str]

_TENANTS_A_WORKER = 1000
_WORKERS = 10_000
_SUSPECTS = 10_000
_WINDOW_SECONDS = 600.0


class Isolation:
    """The group `isolation`. A kind shows as 0 once requests could be judged for it."""

    def __init__(
        self, prove: Proof = lambda _: CERTAIN, tier_of: TierOf = unknown_tier, tree: TreeNow = no_tree
    ) -> None:
        """`prove` says whether a suspicious request is certainly a violation, as `TenantRoutes.prove`; `tier_of` which
        tier served it, as `ServingTiers.of`; `tree` is what engines' KV events show to be stored."""
        self._prove = prove
        self._tier_of = tier_of
        self._violations = Tally("isolation_violations")
        self._audited = Tally("isolation_audited_requests")
        self._not_audited = Tally("isolation_not_audited_requests")
        self._suspects: deque[Request] = deque(maxlen=_SUSPECTS)
        self._recent: defaultdict[Identity, RecentShare] = defaultdict(lambda: RecentShare(_WINDOW_SECONDS))
        self._findings = Findings()
        self._finding_counts = self._findings.tally
        self._untiered: deque[tuple[Request, str]] = deque()
        """Findings, with their certainty, whose tier isn't known yet."""
        self._shared = SharedNamespaces(tree, self._stored, self._stored_together)
        self._cold_prompts = ColdPrompts(prove, self._tested, self._too_fast)
        self._salts_in_use = False
        self._tenants_at: defaultdict[str, set[str]] = defaultdict(set)

    def record(self, request: Request) -> None:
        self._audit(request)
        self._salting(request)
        self._cold_prompts.record(request)
        self._shared.record(request)

    def _audit(self, request: Request) -> None:
        record, cached = request.record, request.cached_tokens
        if not request.completed:
            return
        if cached is None:
            self._pass_over(request, NO_CACHED_TOKENS)
        elif record.own_tokens is None or not record.block_size:
            self._pass_over(request, OWN_UNKNOWN)
        elif _reuses(request):
            self._judge(request)
        else:
            self._found(request, 0)  # whatever other routers sent, the tenant owned this much

    def _judge(self, request: Request) -> None:
        verdict = self._prove(request)
        if verdict == PENDING:
            if len(self._suspects) == _SUSPECTS:
                self._pass_over(self._suspects.popleft(), UNSETTLED)
            self._suspects.append(request)
        elif verdict == CERTAIN:
            self._found(request, 1)
            self._find(request, PROVEN)
        else:
            self._pass_over(request, verdict)
            self._find(request, UNPROVEN)

    def _find(self, request: Request, certainty: str) -> None:
        tier = self._tier_of(request)
        if tier is None and len(self._untiered) < _SUSPECTS:
            self._untiered.append((request, certainty))
        else:
            self._findings.add(request, request.record.finding or CROSS_TENANT_HIT, certainty, tier or UNKNOWN)

    def settle(self) -> None:
        """Judge the suspicious requests that could not be judged when they were read."""
        for _ in range(len(self._suspects)):
            self._judge(self._suspects.popleft())
        for _ in range(len(self._untiered)):
            self._find(*self._untiered.popleft())
        self._shared.settle()
        self._cold_prompts.settle()

    def _found(self, request: Request, violations: int) -> None:
        self._audited.add(1, *request.identity)
        self._violations.add(violations, *request.identity, CROSS_TENANT_HIT)
        self._findings.judged_for_reuse(request.identity)
        self._recent[request.identity].add(request.at_seconds, counts=True)

    def _pass_over(self, request: Request, reason: str) -> None:
        self._not_audited.add(1, *request.identity, reason)
        self._recent[request.identity].add(request.at_seconds, counts=False)

    def _salting(self, request: Request) -> None:
        record = request.record
        if record.salted is None or not record.worker:
            return
        self._salts_in_use = self._salts_in_use or record.salted
        if not record.tenant:
            return
        tenants = self._tenants_of(record.worker)
        if len(tenants) < _TENANTS_A_WORKER:
            tenants.add(owner(record))
        self._findings.judged(request.identity, SALT_KINDS, CONFIGURATION)
        if record.finding in SALT_KINDS and not _reuses(request):
            self._findings.add(request, record.finding, CONFIGURATION)
        exposed = not record.salted and (self._salts_in_use or len(tenants) > 1)
        self._violations.add(exposed, *request.identity, UNSALTED)

    def _tenants_of(self, worker: str) -> set[str]:
        if worker not in self._tenants_at and len(self._tenants_at) >= _WORKERS:
            self._tenants_at.clear()
        return self._tenants_at[worker]

    def _stored(self, request: Request) -> None:
        self._findings.judged(request.identity, STORED_KINDS, CONFIGURATION, (GPU,))

    def _stored_together(self, request: Request, kind: FindingKind, *, other: str, evidence: tuple[str, ...]) -> None:
        self._findings.add(request, kind, CONFIGURATION, GPU, other=other, evidence=evidence)

    def _tested(self, request: Request) -> None:
        self._violations.add(0, *request.identity, FAST_COLD)
        self._findings.judged(request.identity, [FindingKind.FAST_COLD_PROMPT], STATISTICAL)

    def _too_fast(self, request: Request) -> None:
        self._violations.add(1, *request.identity, FAST_COLD)
        self._findings.add(request, FindingKind.FAST_COLD_PROMPT, STATISTICAL)

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        """Where less than 90 % of the window's requests could be audited, *no violation found* proves nothing: its
        series and the audited requests are left out then, so that the objective is unknown. A violation that was found
        is always there."""
        self.settle()
        shares = {identity: share for identity, recent in self._recent.items() if (share := recent.share(now_seconds))}
        blind = {identity for identity, share in shares.items() if share.value < LEAST_AUDITED_RATIO}
        leaked = {key[:-1] for key, count in self._violations.items() if key[-1] == CROSS_TENANT_HIT and count}
        hidden = {tuple(identity) for identity in blind} - leaked
        yield rows(
            "isolation_violations",
            (row for row in self._violations.items() if row[0][-1] != CROSS_TENANT_HIT or row[0][:-1] not in hidden),
        )
        yield rows("isolation_audited_requests", (row for row in self._audited.items() if row[0] not in hidden))
        yield self._not_audited.metric()
        yield rows("isolation_audited_ratio", ((identity, share.value) for identity, share in shares.items()))
        yield rows(
            "isolation_findings",
            (row for row in self._finding_counts.items() if row[0][-2] != PROVEN or row[0][:-3] not in hidden),
        )

    def by_model(self, now_seconds: float) -> dict[str, tuple[float, Share | None]]:
        """Certain violations since the start, and the audited share of the last 10 minutes."""
        self.settle()
        violations: Counter[str] = Counter()
        for key, count in self._violations.items():
            violations[key[0]] += int(count) if key[-1] == CROSS_TENANT_HIT else 0
        shares: defaultdict[str, list[Share]] = defaultdict(list)
        for identity, recent in self._recent.items():
            if share := recent.share(now_seconds):
                shares[identity.model].append(share)
        return {model: (violations[model], Share.over(shares[model])) for model in {*violations, *shares}}

    def document(self, now_seconds: float) -> Mapping[str, Any]:
        self.settle()
        kinds = (CROSS_TENANT_HIT, UNSALTED, FAST_COLD)
        found = {kind: count for kind in kinds if (count := self._violations.total(kind)) is not None}
        reasons: Counter[str] = Counter()
        for key, count in self._not_audited.items():
            reasons[key[-1]] += int(count)
        share = Share.over([share for recent in self._recent.values() if (share := recent.share(now_seconds))])
        findings: defaultdict[str, Counter[str]] = defaultdict(Counter)
        tiers: Counter[str] = Counter()
        for key, count in self._finding_counts.items():
            findings[key[-3]][key[-2]] += int(count)
            if key[-2] == PROVEN:
                tiers[key[-1]] += int(count)
        return {
            "violations": found,
            "audited_requests": int(sum(count for _, count in self._audited.items())),
            "not_audited_requests": reasons.total(),
            "not_audited": {reason: {"requests": n, "why": WHY[reason]} for reason, n in reasons.items()},
            **({"audited_ratio": share.value} if share else {}),
            "findings": {kind: dict(by_certainty) for kind, by_certainty in findings.items()},
            **({"certain_findings_by_tier": dict(tiers)} if tiers else {}),
            "latest_findings": self._findings.latest(),
        }


def _reuses(request: Request) -> bool:
    """Whether the engine reused at least a block beyond what the router knows the tenant to own."""
    record, cached = request.record, request.cached_tokens
    if cached is None or record.own_tokens is None or not record.block_size:
        return False
    return cached >= record.own_tokens + record.block_size
