"""The prober against the real simulated engine, a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from prefixwatch.engines import fleet
from prefixwatch.engines.tiny_model import make_tiny_model
from prefixwatch.exporters.probes.prober import TENANT
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.policies import make_policy
from prefixwatch.router.serving.create import create_app
from tests.exporters.probing import MakeProbes

BLOCK = 16
STEP_SECONDS, TOKEN_SECONDS = 0.005, 0.0002
"""A cold prompt of 500 tokens takes the engine 105 ms, its repeat some 8 ms."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a simulated engine, a process of its own."""
    folder = tmp_path_factory.mktemp("probed")
    model_dir = make_tiny_model(folder / "model")
    step_time = {"base_s": STEP_SECONDS, "per_prefill_token_s": TOKEN_SECONDS}
    options: dict[str, Any] = {"step_time": step_time, "max_num_batched_tokens": 8192, "block_size": BLOCK}
    (handle,) = asyncio.run(fleet.start_simulated(1, model_dir, folder, **options))
    yield handle.url
    asyncio.run(fleet.stop([handle]))


def full_blocks(prompt_tokens: int) -> int:
    """What an engine can reuse of a prompt that it has seen: whole blocks, and the last token is always computed."""
    return (prompt_tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_a_cold_prompt_misses_and_its_repeat_hits(engine: str, probes: MakeProbes, api: str) -> None:
    probed = probes(engine, target={"api": api})
    await probed.rounds(3)
    cold, repeat, *later = probed.ledger.records
    assert cold.prompt_tokens is not None
    assert 450 < cold.prompt_tokens < 1200
    assert repeat.prompt_tokens == cold.prompt_tokens
    template = BLOCK if api == "chat" else 0  # a chat template's opening may fill a block
    assert cold.cached_tokens is not None
    assert cold.cached_tokens <= template
    assert repeat.cached_tokens == full_blocks(cold.prompt_tokens)
    assert cold.ttft_seconds is not None
    assert cold.ttft_seconds > STEP_SECONDS + TOKEN_SECONDS * (cold.prompt_tokens - template)
    assert min(one.ttft_seconds or 0 for one in (repeat, *later[1::2])) < cold.ttft_seconds
    assert (cold.outcome, cold.worker, cold.model, cold.tenant, cold.request_class) == (
        "completed", "w", "tiny", TENANT, "probe",
    )  # fmt: skip


async def test_the_page(engine: str, probes: MakeProbes) -> None:
    probed = probes(engine)
    await probed.rounds(3)
    samples = probed.samples()
    prompt_tokens = samples["probe_prompt_tokens", "w"]
    assert samples["probe_requests_total", "w/completed"] == 6
    records = probed.ledger.records
    assert samples["probe_tokens_total", "w/tiny/prompt"] == sum(one.prompt_tokens or 0 for one in records)
    assert samples["probe_tokens_total", "w/tiny/cached"] == sum(one.cached_tokens or 0 for one in records) > 0
    assert samples["probe_cached_tokens", "w/cold"] == 0
    assert samples["probe_cached_tokens", "w/repeat"] == full_blocks(int(prompt_tokens))
    assert samples["probe_ttft_seconds_count", "w/cold"] == samples["probe_ttft_seconds_count", "w/repeat"] == 3
    assert samples["probe_ttft_seconds_sum", "w/cold"] > samples["probe_ttft_seconds_sum", "w/repeat"]
    findings = ("caching_off", "cached_tokens_unreported", "repeat_not_faster", "cold_prompt_hit")
    assert [samples["probe_finding", f"w/{finding}"] for finding in findings] == [0, 0, 0, 0]
    assert ("probe_finding", "w/cross_tenant_hit") not in samples


async def test_the_baseline_is_the_engines_step_time(engine: str, probes: MakeProbes) -> None:
    """Three lengths in turn. What the model says is exact, what a busy machine adds is anybody's guess: it has room."""
    probed = probes(engine, prompt_tokens=[200, 800, 2400])
    await probed.rounds(9)
    estimates = probed.prober.baselines.estimates()
    model = probed.prober.targets["w"].model
    assert list(estimates) == [(model, length) for length in ("0-512", "512-2048", "2048-8192")]
    for estimate in estimates.values():
        expected = STEP_SECONDS + TOKEN_SECONDS * estimate.tokens
        assert expected <= estimate.seconds < 2 * expected + 0.3
    line = probed.prober.baselines.line()
    assert line is not None
    assert line.slope_seconds_per_token == pytest.approx(TOKEN_SECONDS, rel=0.6)
    page = probed.samples()
    assert page["cold_prefill_baseline_seconds", f"{model}/2048-8192"] == estimates[model, "2048-8192"].seconds


async def test_salts_keep_the_canary_apart(engine: str, probes: MakeProbes) -> None:
    probed = probes(engine, isolation={"every_rounds": 1})
    await probed.rounds(1)
    assert probed.samples()["probe_finding", "w/cross_tenant_hit"] == 0
    assert probed.samples()["probe_canaries_total", "w/miss"] == 1
    assert probed.samples()["probe_canaries_total", "w/hit"] == 0


async def test_without_salts_the_canary_hits(engine: str, probes: MakeProbes) -> None:
    """Two tenants by header only, and nothing in front of the engine that salts: a certain cross-tenant reuse."""
    senders = {
        "first": {"salted": False, "http_headers": {"x-tenant-id": "a"}},
        "second": {"salted": False, "http_headers": {"x-tenant-id": "b"}},
    }
    probed = probes(engine, isolation={"every_rounds": 1, **senders})
    await probed.rounds(1)
    assert probed.samples()["probe_finding", "w/cross_tenant_hit"] == 1
    assert probed.samples()["probe_canaries_total", "w/hit"] == 1


@pytest.mark.parametrize(("salts", "result"), [({"a": "salt of a", "b": "salt of b"}, "miss"), ({}, "hit")])
async def test_through_a_router_the_canary_sees_whether_it_salts(
    engine: str, probes: MakeProbes, salts: dict[str, str], result: str
) -> None:
    """Neither sender salts, both are the router's tenants by header: whether they are apart is the router's doing."""
    senders = {
        "first": {"salted": False, "http_headers": {"x-tenant-id": "a"}},
        "second": {"salted": False, "http_headers": {"x-tenant-id": "b"}},
    }
    config = RouterConfig.model_validate({"workers": [{"name": "e", "url": engine}], "tenants": {"salts": salts}})
    runner = web.AppRunner(create_app(config, policy=make_policy("round_robin"), tokenizer=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    probed = probes(url, target={"api": "chat", "model": "tiny"}, isolation={"every_rounds": 1, **senders})
    await probed.rounds(1)
    await runner.cleanup()
    assert +probed.state.canaries == {result: 1}


async def test_no_probe_while_requests_wait(engine: str, probes: MakeProbes) -> None:
    probed = probes(engine, waiting=1.0)
    await probed.rounds(1)
    assert probed.ledger.records == []
    assert probed.samples() == {("probe_requests_total", "w/skipped"): 1}
    assert probed.state.paused == "1 requests are waiting, more than max_waiting_requests 0"
    probed.waiting = 0.0
    await probed.rounds(1)
    assert len(probed.ledger.records) == 2
    assert probed.state.paused == ""


async def test_no_probe_beyond_the_budget(engine: str, probes: MakeProbes) -> None:
    probed = probes(engine, target_tokens_per_minute=3000)
    for _ in range(4):
        await probed.prober.round(probed.state)
    spent = sum((record.prompt_tokens or 0) + (record.output_tokens or 0) for record in probed.ledger.records)
    assert 0 < spent <= 3000
    assert "target_tokens_per_minute is spent" in probed.state.paused
    probed.clock.now += 60
    sent = len(probed.ledger.records)
    await probed.rounds(1)
    assert len(probed.ledger.records) == sent + 2


async def test_a_prompt_that_is_too_long_is_left_out(engine: str, probes: MakeProbes) -> None:
    """The engine takes 8,192 tokens at most; lengths are estimates from the words of the first prompt."""
    probed = probes(engine, prompt_tokens=[200, 16_000], target_tokens_per_minute=40_000)
    await probed.rounds(2)
    assert probed.state.plan.lengths == [200]
    assert probed.samples()["probe_requests_total", "w/rejected"] == 1
    assert "HTTP 400" in probed.state.problem


async def test_it_runs_by_itself(engine: str, probes: MakeProbes) -> None:
    probed = probes(engine, interval_seconds=1)
    probed.clock.now = 60
    probed.prober.start()
    async with asyncio.timeout(20):
        await probed.ledger.second.wait()
    await probed.prober.stop()
    assert probed.state.rounds == 1
