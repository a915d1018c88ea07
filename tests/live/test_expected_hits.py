"""What a scenario says beforehand that a cache would reuse is what a real vLLM reports, to within a block a request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from prefixwatch.documents import parse
from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.kvcache.cache_class import reusable_part
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.loadgen.plan.planner import make_plan
from prefixwatch.loadgen.plan.prompts import PromptWriter
from prefixwatch.loadgen.plan.request import PlannedRequest
from prefixwatch.loadgen.scenario.model import Scenario
from prefixwatch.loadgen.sending.served_tokenizer import ServedTokenizer

pytestmark = pytest.mark.vllm

BASE = """\
name: live
duration_seconds: 12
arrivals: {rate_per_second: 2}
groups: {count: 2, shared_tokens: {min: 150, max: 400}, unique_tokens: {min: 8, max: 90}, output_tokens: 3}
"""
NESTING = """\
name: live
duration_seconds: 12
arrivals: {rate_per_second: 2}
groups:
  nesting: [{name: company, count: 2, tokens: 130}, {name: product, count: 2, tokens: {median: 90, sigma: 0.5}}]
  unique_tokens: {min: 8, max: 90}
  output_tokens: 2
"""
KINDS = {
    "groups and tenants": BASE + "tenants: [{name: a, salt: sa}, {name: b, salt: sb}]\n",
    "nesting": NESTING,
    "sessions that fork": BASE + "sessions: {turns: 3, think_seconds: 1, forks: {share: 0.5}}\n",
    "documents": BASE + "documents: {count: 4, per_turn: 2, tokens: 70}\n",
    "tools and examples": BASE
    + "tools: {count: 4, tokens: 40, shuffled_share: 0.3}\nfew_shot: {pool: 3, shots: 2, tokens: 40}\n",
    "tools as a field": BASE
    + "tools: {count: 3, tokens: 40, sent_as: field, shuffled_share: 0.3}\nsessions: {turns: 2, think_seconds: 1}\n",
    "dynamic front": BASE + "dynamic_front: {tokens: 6, share: 0.5}\n",
    "roll-out": BASE + "rollout: {at_seconds: 5, keeps_tokens: 70}\n",
}


async def usage_of(session: aiohttp.ClientSession, url: str, request: PlannedRequest) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tiny", "messages": request.messages, "max_tokens": request.max_tokens}
    if request.tools is not None:
        body |= {"tools": request.tools, "tool_choice": request.tool_choice}
    if request.salt is not None:
        body["cache_salt"] = request.salt
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        usage: dict[str, Any] = json.loads(await response.text())["usage"]
        return usage


@pytest.mark.parametrize("kind", KINDS)
async def test_a_real_engine_hits_what_the_plan_says(
    engines: list[EngineHandle], session: aiohttp.ClientSession, tokenizer: Tokenizer, kind: str
) -> None:
    engine = engines[0]
    scenario = parse(KINDS[kind], Scenario, name="live.yaml")
    plan = make_plan(scenario, PromptWriter(tokenizer), seed=3, nonce=f"live {kind}", model="tiny")
    hits = 0
    for request in plan.requests:
        usage = await usage_of(session, engine.url, request)
        assert usage["prompt_tokens"] == request.prompt_tokens
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        expected = reusable_part(request.shared_tokens, request.prompt_tokens, engine.block_size)
        assert abs(cached - expected) <= engine.block_size
        hits += cached
    assert len(plan.requests) > 12
    assert hits > 0


async def test_tools_in_any_form_are_as_many_tokens_as_the_engine_counts(
    engines: list[EngineHandle], session: aiohttp.ClientSession, tokenizer: Tokenizer
) -> None:
    """However a client writes them: our rendering is vLLM's."""
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "read", "description": "reads a file", "parameters": parameters}},
        {"function": {"parameters": parameters, "name": "write", "unknown": 1}, "type": "function"},
        {"type": "function", "function": {"strict": True, "name": "stop"}},
    ]
    messages = [{"role": "user", "content": "go on"}]
    body = {"model": "tiny", "messages": messages, "tools": tools}
    async with session.post(f"{engines[0].url}/tokenize", json=body) as response:
        tokenized = await response.json()
    assert tokenized["tokens"] == tokenizer.encode_chat(messages, tools=tools).tolist()
    chat = body | {"tool_choice": "none", "max_tokens": 1}
    async with session.post(f"{engines[0].url}/v1/chat/completions", json=chat) as response:
        assert (await response.json())["usage"]["prompt_tokens"] == tokenized["count"]


async def test_prompts_made_by_the_engines_own_tokenize_are_exact(
    engines: list[EngineHandle], session: aiohttp.ClientSession, tokenizer: Tokenizer
) -> None:
    """No folder: the plan's token counts and hits come from `/tokenize` alone."""
    engine = engines[0]
    served = ServedTokenizer(engine.url, engine.model)
    writer = await asyncio.to_thread(PromptWriter, served)
    scenario = parse(KINDS["tools as a field"], Scenario, name="live.yaml")
    plan = await asyncio.to_thread(make_plan, scenario, writer, seed=4, nonce="live served", model="tiny")
    assert len(writer.alphabet.ids) > 1000
    for request in plan.requests[:12]:
        usage = await usage_of(session, engine.url, request)
        assert usage["prompt_tokens"] == request.prompt_tokens
        assert request.prompt_tokens == len(tokenizer.encode_chat(request.messages, tools=request.tools))
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        expected = reusable_part(request.shared_tokens, request.prompt_tokens, engine.block_size)
        assert abs(cached - expected) <= engine.block_size
    assert served.questions < 60
