"""An hour of six routers, 50 tenants and restarts, from what the routers remember to the exporter's findings."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from prefixwatch.exporters.http.client_config import ClientConfig
from prefixwatch.kvcache.blocks import Tokens, block_hashes, namespace_root
from prefixwatch.openai_api.answer import Answer, Usage
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.exchange.endpoints import CHAT
from prefixwatch.router.exchange.exchange import Exchange, Outcome
from prefixwatch.router.exchange.prompt import Prompt
from prefixwatch.router.placement.dispatch import CacheLosses, Placement
from prefixwatch.router.policy import Decision, RouteRequest
from prefixwatch.router.records import recorder
from prefixwatch.router.records.recorder import Recorder
from prefixwatch.router.records.request_log import RequestLog
from tests.exporters.test_isolation_many_routers import BLOCK, TICK_SECONDS, Fleet, Router

WORKERS = 24
REUSE_LEAKS = ("salt_ignored", "salt_reused", "tenant_without_salt", "cross_tenant_hit")


class RealRouter(Router):
    """The router's own recorder; only engines, transport and clock are made up."""

    def begin(self, fleet: RealFleet) -> None:
        config = RouterConfig.model_validate(
            {
                "workers": [{"name": name, "url": "http://x"} for name in fleet.workers],
                "request_records": {"hash_secret": "one secret for the fleet"},
            }
        )
        self.log = RequestLog(100_000)
        self.recorder = Recorder(
            config, "score", self.log, lambda worker: fleet.workers[worker].started >= self.started
        )

    async def get(self, url: str, client: ClientConfig) -> bytes:
        page = self.log.page(int(url.rpartition("=")[2]))
        return msgspec.json.encode(msgspec.structs.replace(page, started=f"{self.name}-{self.life}"))


class RealFleet(Fleet):
    """Salted tenants that share a public system prompt, in engines that keep salts apart unless a leak is planted."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, workers=WORKERS)
        self.tokens = np.random.default_rng(seed)
        self.public = self.fresh(200)
        self.system = {tenant: self.fresh(100 + 10 * k) for k, tenant in enumerate(self.tenants)}
        self.talks: list[tuple[str, Tokens]] = []
        self.number = 0
        real = [RealRouter(router.name, router.started) for router in self.routers]
        for router in real:
            router.begin(self)
        self.routers[:] = real
        self.start_exporter()

    def fresh(self, tokens: int) -> Tokens:
        return self.tokens.integers(0, 1 << 17, tokens, dtype=np.uint32)

    def send(
        self, tenant: str, prompt: Tokens, *, router: Router | None = None, worker: str = "",
        salt: str | None = "", ignored: bool = False, hidden: bool = False,
    ) -> int:  # fmt: skip
        """Send one request; returns what was reused. The engine ignores salts or hides what it reuses where asked."""
        self.number += 1
        router = router or self.rng.choice(self.routers)
        assert isinstance(router, RealRouter)
        worker = worker or self.rng.choice(list(self.workers))
        salt = f"salt of {tenant}" if salt == "" else salt
        root = namespace_root(salt)
        blocks = block_hashes(prompt, BLOCK, root=root)
        plain = block_hashes(prompt, BLOCK)
        held = self.workers[worker].cache
        looked_up = plain if ignored else blocks
        reused = next((k for k, block in enumerate(looked_up.tolist()) if block not in held), len(looked_up)) * BLOCK
        reused = min(reused, (len(prompt) - 1) // BLOCK * BLOCK)
        exchange = Exchange(f"q{self.number}", CHAT, self.now, tenant=tenant)
        exchange.prompt = Prompt(b"", "m", True, 0, prompt, blocks, 0.0, 0.0, salted=bool(salt), salt_root=root)
        request = RouteRequest(exchange.id, len(prompt), prompt, blocks, BLOCK)
        exchange.placement = Placement(
            request, Decision(worker, "score"), None, 0.0, 0.0, None, (), CacheLosses()  # type: ignore[arg-type]
        )  # fmt: skip
        router.recorder.placed(exchange)
        answer = self.fresh(self.rng.randrange(1, 60))
        exchange.answer = Answer()
        exchange.answer.usage = Usage(len(prompt), 0 if hidden else reused, len(answer))
        exchange.outcome = Outcome.COMPLETED
        uncached = len(prompt) - reused
        exchange.first_content_at = self.now + (0.02 + 2e-4 * uncached) * self.rng.lognormvariate(0, 0.3)
        exchange.ended_at = exchange.first_content_at + 0.5
        router.recorder.ended(exchange)
        whole = np.concatenate([prompt, answer])
        held.update(block_hashes(whole, BLOCK, root=root).tolist(), block_hashes(whole, BLOCK).tolist())
        if tenant in self.system and self.rng.random() < 0.3:
            self.talks = [*self.talks[-200:], (tenant, whole)]
        return 0 if hidden else reused

    def request(self, leak: bool = False) -> None:
        if self.talks and self.rng.random() < 0.4:
            tenant, before = self.rng.choice(self.talks)
            self.send(tenant, np.concatenate([before, self.fresh(40)]))
            return
        tenant = self.rng.choice(self.tenants)
        self.send(tenant, np.concatenate([self.public, self.system[tenant], self.fresh(self.rng.randrange(20, 300))]))

    def restart_router(self, router: Router) -> None:
        super().restart_router(router)
        assert isinstance(router, RealRouter)
        router.begin(self)

    def plant(self, kind: str, number: int) -> None:
        """A leak: what a victim sent, a thief that never sent anything reuses."""
        victim, thief, secret = f"victim-{kind}-{number}", f"thief-{kind}-{number}", self.fresh(800)
        worker = self.rng.choice(list(self.workers))
        one, other = self.rng.sample(self.routers, 2)
        if kind == "salt_per_request":
            for k in range(9):
                self.send(victim, secret, router=one, worker=worker, salt=f"{victim} {k}")
            return
        salt = {"salt_reused": f"common {number}", "tenant_without_salt": None}.get(kind, "")
        self.send(victim, secret, router=other if kind == "cross_tenant_hit" else one, worker=worker, salt=salt)
        ignored = kind in ("salt_ignored", "cross_tenant_hit")
        assert self.send(thief, secret, router=one, worker=worker, salt=salt, ignored=ignored) >= 780

    def found(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = self.ledger.document(self.now)["isolation"]["findings"]
        return {
            kind: {c: n for c, n in of_kind.items() if n} for kind, of_kind in found.items() if any(of_kind.values())
        }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[RealFleet]:
    """The recorder's clock is that of the fleet in the list."""
    fleets: list[RealFleet] = []
    monkeypatch.setattr(recorder, "time", lambda: fleets[0].now)
    return fleets


async def test_an_hour_with_restarts_has_no_certain_finding_but_the_20_planted_leaks(clock: list[RealFleet]) -> None:
    fleet = RealFleet(1)
    clock.append(fleet)
    kinds = [*REUSE_LEAKS, "salt_per_request"] * 4
    for tick in range(int(3600 / TICK_SECONDS)):
        if tick % 40 == 7:
            fleet.restart_worker(fleet.rng.choice(list(fleet.workers)))
        if tick in (150, 300):
            fleet.restart_router(fleet.routers[tick // 150])
        if tick == 300:
            assert {certainty for of_kind in fleet.found().values() for certainty in of_kind} == {"unproven"}
            fleet.start_exporter()
        if tick == 400:  # what old engines hold is unknown to a new exporter, so all are deployed again
            for worker in fleet.workers:
                fleet.restart_worker(worker)
        if tick >= 400 and tick % 10 == 0 and kinds:
            fleet.plant(kinds.pop(), tick)
        await fleet.tick(3)
    assert not kinds, "all 20 were planted"
    found = fleet.found()
    assert {kind: found[kind]["certain"] for kind in REUSE_LEAKS} == dict.fromkeys(REUSE_LEAKS, 4)
    assert found["salt_per_request"] == {"configuration": 8}, "of nine requests each, the last two"
    latest: list[dict[str, Any]] = fleet.ledger.document(fleet.now)["isolation"]["latest_findings"]
    evidence = [one for one in latest if one["certainty"] == "certain"]
    assert len(evidence) == 16
    assert all(len(one["evidence"]) == (1 if one["kind"] == "cross_tenant_hit" else 2) for one in evidence)
    assert not any("thief" in str(one) or "victim" in str(one) for one in evidence), "unnamed tenants have pseudonyms"


async def test_an_engine_that_reports_no_reuse_is_found_by_its_first_tokens(clock: list[RealFleet]) -> None:
    """Salts are ignored, and cached tokens reported as 0: only time shows it."""
    fleet = RealFleet(2)
    clock.append(fleet)
    worker = "w0"

    async def hour(ignored: bool) -> float:
        begun = fleet.found().get("fast_cold_prompt", {}).get("statistical", 0)
        for number in range(40):
            for k in range(12):
                fleet.send(f"lonely{k}", fleet.fresh(990), worker=worker, ignored=ignored, hidden=True)
            secret, who = fleet.fresh(1000), f"{ignored}{number}"
            fleet.send(f"victim{who}", secret, worker=worker, ignored=ignored, hidden=True, router=fleet.routers[0])
            await fleet.tick(0)
            fleet.send(f"thief{who}", secret, worker=worker, ignored=ignored, hidden=True, router=fleet.routers[0])
            await fleet.tick(0)
        return fleet.found().get("fast_cold_prompt", {}).get("statistical", 0) - begun

    await fleet.tick(0)
    await fleet.tick(0)
    assert await hour(ignored=False) == 0
    assert await hour(ignored=True) >= 1
