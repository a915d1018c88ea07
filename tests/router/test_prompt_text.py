"""The prompt as plain text, for policies that look at text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.exchange.endpoints import CHAT, COMPLETIONS
from prefixwatch.router.exchange.prompt import PromptReader
from prefixwatch.router.policies import make_policy
from prefixwatch.router.serving.create import create_app
from prefixwatch.router.tenant_config import TenantsConfig
from tests.router.conftest import Start
from tests.router.fake_engine import FakeEngine


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        (CHAT, {"messages": [{"role": "system", "content": "be brief"}, {"content": "hi"}]}, "be brief\nhi"),
        (CHAT, {"messages": [{"content": [{"type": "text", "text": "see"}, {"type": "image_url"}]}]}, "see"),
        (CHAT, {"messages": [{"content": None}, "odd", {}]}, ""),
        (CHAT, {"messages": "odd"}, ""),
        (COMPLETIONS, {"prompt": "once"}, "once"),
        (COMPLETIONS, {"prompt": ["once", "twice"]}, "once"),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, ""),
        (COMPLETIONS, {"prompt": []}, ""),
    ],
)
def test_the_text_is_what_the_client_wrote(path: str, fields: dict[str, Any], text: str) -> None:
    reader = PromptReader(None, block_size=16, tenants=TenantsConfig())
    prompt = reader.read(path, json.dumps(fields).encode(), "", tokens=False, blocks=False, text=True)
    assert prompt.text == text
    tokens = None if prompt.tokens is None else prompt.tokens.tolist()
    assert tokens == (fields.get("prompt") if text == "" and path == COMPLETIONS else None)


def test_nothing_is_tokenised_for_a_policy_that_looks_at_text(tokenizer: Tokenizer) -> None:
    reader = PromptReader(tokenizer, block_size=16, tenants=TenantsConfig())
    prompt = reader.read(COMPLETIONS, b'{"prompt": "once"}', "", tokens=False, blocks=False, text=True)
    assert (prompt.text, prompt.tokens) == ("once", None)
    config = RouterConfig.model_validate({"workers": [{"name": "a", "url": "http://127.0.0.1:1"}]})
    create_app(config, policy=make_policy("prefixaware"), tokenizer=None)


@pytest.mark.parametrize(("salts", "found"), [({"acme": "salt a", "bolt": "salt b"}, False), ({}, True)])
def test_a_tenants_text_is_found_tokenised_exactly_where_its_cache_is_shared(
    salts: dict[str, str], found: bool
) -> None:
    """Else the router itself would show in time what another tenant sent, whatever the engines' salts."""
    tokenizer = Tokenizer(default_model_dir())
    assert tokenizer.segments is not None
    reader = PromptReader(tokenizer, block_size=16, tenants=TenantsConfig(names=["acme", "bolt"], salts=salts))
    body = json.dumps({"messages": [{"role": "user", "content": f"a secret of {sorted(salts)}"}]}).encode()
    counted = []
    for tenant in ("acme", "bolt"):
        before = tokenizer.segments.misses
        reader.read(CHAT, body, tenant, tokens=True, blocks=True)
        counted.append(tokenizer.segments.misses - before)
    assert (counted[1] < counted[0]) is found


async def test_chats_that_open_alike_meet_at_one_engine(engines: list[FakeEngine], start: Start) -> None:
    client = await start(engines, policy="prefixaware")
    placed = set()
    for k in range(8):
        async with client.chat(f"{'the same opening ' * 20}{k}") as answer:
            await answer.read()
            placed.add(answer.headers["x-prefixwatch-worker"])
    assert len(placed) == 1
