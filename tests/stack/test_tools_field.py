"""A scenario's tools, sent as the API's own field: what the plan expects, the router predicts and the engine reuses."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from prefixwatch.documents import parse
from prefixwatch.engines.simulated.config import SimulatedEngineConfig
from prefixwatch.engines.simulated.server import SimulatedEngine
from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.kvcache.cache_class import reusable_part
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.loadgen.plan.planner import make_plan
from prefixwatch.loadgen.plan.prompts import PromptWriter
from prefixwatch.loadgen.plan.request import PlannedRequest
from prefixwatch.loadgen.scenario.model import Scenario
from prefixwatch.router.config import RouterConfig, WorkerConfig
from prefixwatch.router.policies import make_policy
from prefixwatch.router.serving.create import ROUTER, create_app

BLOCK = 16
SCENARIO = """\
name: tools
duration_seconds: 12
arrivals: {rate_per_second: 2}
groups: {count: 2, shared_tokens: 60, unique_tokens: {min: 5, max: 40}, output_tokens: 2}
tools: {count: 3, tokens: {min: 20, max: 60}, sent_as: field, shuffled_share: 0.3}
sessions: {turns: {1: 1, 3: 1}, think_seconds: 1}
"""


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A router in front of one simulated engine whose cache never ends."""
    tokenizer = Tokenizer(default_model_dir())
    engine = SimulatedEngine(SimulatedEngineConfig(model_dir=default_model_dir(), speed=200.0, block_size=BLOCK))
    await engine.start()
    config = RouterConfig(
        workers=[WorkerConfig(name="w0", url=engine.url)], block_size=BLOCK, model_dir=default_model_dir()
    )
    app = create_app(config, policy=make_policy("cache_aware"), tokenizer=tokenizer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    await app[ROUTER].wait_for_workers()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()
    await engine.stop()


async def sent(session: aiohttp.ClientSession, url: str, request: PlannedRequest) -> tuple[int, int, int]:
    """Prompt tokens and hit tokens that the engine reports, and the hit tokens that the router predicted."""
    body = {"model": "tiny", "messages": request.messages, "tools": request.tools, "tool_choice": request.tool_choice}
    async with session.post(f"{url}/v1/chat/completions", json=body | {"max_tokens": 2}) as response:
        assert response.status == 200, await response.text()
        usage = (await response.json())["usage"]
        predicted = int(response.headers["x-prefixwatch-predicted-tokens"])
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], predicted


async def test_tools_as_a_field_hit_what_the_plan_and_the_router_say(url: str) -> None:
    writer = PromptWriter(Tokenizer(default_model_dir()))
    plan = make_plan(parse(SCENARIO, Scenario, name="tools.yaml"), writer, seed=2, nonce="n", model="tiny")
    expected = [reusable_part(r.shared_tokens, r.prompt_tokens, BLOCK) for r in plan.requests]
    async with aiohttp.ClientSession() as session:
        found = [await sent(session, url, request) for request in plan.requests]
    assert found == [(r.prompt_tokens, hits, hits) for r, hits in zip(plan.requests, expected, strict=True)]
    assert len({tuple(tool["function"]["name"] for tool in r.tools or []) for r in plan.requests}) > 1
    assert sum(expected) > 0.5 * sum(r.prompt_tokens for r in plan.requests)
