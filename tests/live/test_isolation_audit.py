"""Isolation on real vLLM engines, audited and watched: salted, unsalted, and with an outer tier that drops salts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixwatch.engines.fleet import EngineHandle, reset_caches
from prefixwatch.exporters.app import running
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.router.tenant_config import IsolationConfig, TenantsConfig
from prefixwatch.stack.local.fleet import as_workers
from tests.live.alerting import alerting, reading
from tests.live.chats import BLOCK, routed
from tests.live.conftest import MakePrompt, engines_with_a_store
from tests.stack.command_line import prefixwatch

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]  # on a crowded machine engines take minutes to start

TENANTS = ("acme", "bolt")
PROMPT_TOKENS = 20 * BLOCK
LOOKED_BEFORE_SECONDS = 2.5
"""Longer than clocks may differ: a page that was read sooner before a request doesn't tell what it adds."""
SALTS = ("--victim-salt", "random", "--attacker-salt", "random")


def audit(engine: EngineHandle, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the content of audit.json."""
    ended = prefixwatch(
        *("audit", "isolation", "--target", engine.url, "--engine", engine.url, "--out", str(out)),
        *("--pause", "0.05", "--rate", "100", *options),
    )
    assert ended.code in (0, 1, 3), ended.err
    document: dict[str, Any] = json.loads((out / "audit.json").read_text(encoding="utf-8"))["audit"]
    return ended.code, document


def states(document: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(each["test"], each["tier"]): each["state"] for each in document["findings"]}


@pytest.mark.parametrize("salted", [True, False])
def test_salts_isolate_and_without_them_tokens_and_time_show_the_leak(
    engines: list[EngineHandle], tmp_path: Path, salted: bool
) -> None:
    code, document = audit(engines[0], tmp_path, "--samples", "24", "--prompt-tokens", "768", *SALTS * salted)
    timing = next(each for each in document["findings"] if each["test"] == "timing")["figures"]
    assert timing["power"] >= 0.99
    decided = "isolated" if salted else "leak"
    by_chance = salted and timing["p_value"] < 0.01  # once in a hundred runs; never as low as a leak's
    overall = "inconclusive" if by_chance else decided
    assert states(document) == {
        ("tokens", "all"): decided,
        ("tokens", "gpu"): decided,
        ("tokens", "outer"): "unavailable",
        ("timing", "all"): overall,
    }
    assert (code, document["verdict"]) == ({"isolated": 0, "leak": 1, "inconclusive": 3}[overall], overall)
    assert document["price"]["hit_tokens"] >= 650
    assert document["price"]["seconds"] > 0


@pytest.fixture(scope="module")
def tiered(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHandle]:
    """An engine whose outer tier is keyed by tokens without the salt (vLLM's example connector)."""
    for (engine,) in engines_with_a_store(1, model_dir, tmp_path_factory.mktemp("tiered")):
        yield engine


def test_a_tier_that_drops_the_salt_is_found_and_the_gpu_tier_is_cleared(tiered: EngineHandle, tmp_path: Path) -> None:
    """sgl-project/sglang#37160, LMCache/LMCache#4825 (IS04)."""
    code, document = audit(tiered, tmp_path, "--samples", "6", "--prompt-tokens", "256", "--tests", "tokens", *SALTS)
    assert states(document) == {("tokens", "all"): "leak", ("tokens", "gpu"): "isolated", ("tokens", "outer"): "leak"}
    assert (code, document["verdict"]) == (1, "leak")
    assert document["statement"].startswith(
        "Leak: one tenant can see what another sent. Shown by: tokens (all tiers), "
    )
    assert "Isolated: tokens (GPU tier)." in document["statement"]


@pytest.mark.prometheus
@pytest.mark.parametrize(
    ("salted", "kind", "tier"), [(True, "salt_ignored", "external"), (False, "tenant_without_salt", "gpu")]
)
async def test_traffic_alone_shows_the_leak_and_the_tier_that_leaks(
    tiered: EngineHandle,
    model_dir: Path,
    make_prompt: MakePrompt,
    tmp_path: Path,
    *,
    salted: bool,
    kind: str,
    tier: str,
) -> None:
    """Nobody audits; one tenant sends what another one sent. With salts the GPU keeps them apart, and the folder
    doesn't. Without them the GPU serves it before the folder is asked. The alert fires; its page tells the two apart.
    """
    await reset_caches([tiered])
    salts = {name: f"salt of {name}" for name in TENANTS if salted}
    settings: dict[str, Any] = {
        "tenants": TenantsConfig(names=list(TENANTS), salts=salts),
        "isolation": IsolationConfig(caches_at_start="empty"),
        "always_predict": True,
    }
    messages = [{"role": "user", "content": make_prompt(PROMPT_TOKENS)}]
    async with routed(as_workers([tiered]), model_dir, tmp_path, policy="round_robin", **settings) as client:
        targets = (TargetConfig(name=tiered.name, url=tiered.url), TargetConfig(name="router", url=client.url))
        config = ExporterConfig(targets=targets, listen="127.0.0.1:0", interval_seconds=1.0, timeout_seconds=0.9)
        async with running(config) as exporter, alerting(exporter.url, tmp_path) as prometheus:
            cached = []
            for name in TENANTS:
                await exporter.scrape_all()
                await asyncio.sleep(LOOKED_BEFORE_SECONDS)
                cached.append((await client.chat(messages, {"x-tenant-id": name})).cached_tokens)
            found = await certain_findings(exporter)
            fired = await prometheus.fires("IsolationViolation")
            state = "bad" if salted else "ok"
            diagnosis = await prometheus.diagnosis("IsolationViolation", {"salts-ignored": state})
    assert (cached[0], (cached[1] or 0) >= PROMPT_TOKENS - BLOCK) == (0, True), cached
    assert found == [(kind, *reversed(TENANTS), tier)]
    assert fired
    assert reading(diagnosis, "cross-tenant-hits") == "bad"
    assert reading(diagnosis, "salts-ignored") == state
    assert ("salt_ignored" in [cause.id for cause in diagnosis.causes]) is salted


async def certain_findings(exporter: Exporter) -> list[tuple[str, str, str, str]]:
    """Kind, tenant, other tenant and tier, once a page that was read later shows the tier."""
    deadline = time.monotonic() + 60.0
    found: list[tuple[str, str, str, str]] = []
    while not found and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        latest = exporter.ledger.document(time.monotonic())["isolation"]["latest_findings"]
        found = [
            (one["kind"], one["tenant"], one.get("other_tenant", ""), one["tier"])
            for one in latest
            if one["certainty"] == "certain"
        ]
    return found
