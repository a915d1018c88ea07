"""`routing_key`: prompts that differ in a time stamp alone go to one worker, and what is sent never changes."""

from __future__ import annotations

import json
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.kvcache.prompts.mending import KINDS, ChatPrompt, mended
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.errors import RouterError
from prefixwatch.router.exchange.endpoints import CHAT, COMPLETIONS
from prefixwatch.router.exchange.prompt import PromptReader
from prefixwatch.router.policies import make_policy
from prefixwatch.router.serving.create import create_app
from prefixwatch.router.tenant_config import TenantsConfig
from tests.router.conftest import Start
from tests.router.fake_engine import FakeEngine

TINY = Tokenizer(default_model_dir())
WORKERS = [{"name": "a", "url": "http://127.0.0.1:1"}]


def reader(*kinds: str) -> PromptReader:
    return PromptReader(TINY, block_size=16, tenants=TenantsConfig(), routing_key=kinds)


def asked_at(clock: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": f"It is 2026-05-04 {clock}. " + "Answer in one short sentence. " * 8},
        {"role": "user", "content": "Where is the key?"},
    ]


def read(body: dict[str, Any], *kinds: str, path: str = CHAT) -> Any:
    return reader(*kinds).read(path, json.dumps(body).encode(), "", tokens=True, blocks=True, text=True)


@pytest.mark.parametrize(
    ("path", "early", "late"),
    [
        (CHAT, {"messages": asked_at("10:00:00")}, {"messages": asked_at("23:59:59")}),
        (COMPLETIONS, {"prompt": "At 10:00:00: go on"}, {"prompt": "At 10:00:07: go on"}),
        (COMPLETIONS, {"prompt": ["At 10:00: go on", "b"]}, {"prompt": ["At 10:01: go on", "c"]}),
    ],
)
def test_prompts_that_differ_in_a_time_stamp_have_one_key(path: str, early: Any, late: Any) -> None:
    one, other = (read(body, "time", path=path) for body in (early, late))
    assert one.tokens.tolist() != other.tokens.tolist()
    assert one.key.tokens.tolist() == other.key.tokens.tolist()
    assert one.key.blocks.tolist() == other.key.blocks.tolist()
    assert one.key.text == other.key.text
    assert "<time>" in one.key.text


def test_tools_in_another_order_have_one_key() -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("find", "open")]
    bodies = [{"messages": asked_at("10:00"), "tools": listed} for listed in (tools, tools[::-1])]
    keys = [read(body, "tools").key.tokens.tolist() for body in bodies]
    assert keys[0] == keys[1]


texts = st.text("ab :0123456789-\n<>v.", max_size=24) | st.sampled_from(
    ["10:00:00 x", "req-12345", "v1.2.3", "<think>a</think>"]
)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant"]),
            "content": st.one_of(
                texts, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts})), st.none()
            ),
        }
    )
    | st.just("odd"),
    max_size=4,
)
bodies = st.fixed_dictionaries(
    {"messages": messages, "cache_salt": st.sampled_from(["", "s"]), "seed": st.integers(0, 9)},
    optional={"tools": st.sampled_from([None, "odd", [{"b": 1, "a": 2}]]), "stream": st.booleans()},
)


@settings(max_examples=150, deadline=None)
@given(bodies, st.lists(st.sampled_from(sorted(KINDS)), unique=True, min_size=1))
def test_the_bytes_that_are_sent_and_all_but_the_key_never_change(body: dict[str, Any], kinds: list[str]) -> None:
    sent = json.dumps(body).encode()
    plain, keyed = (
        PromptReader(TINY, block_size=16, tenants=TenantsConfig(trust_client_salt=True), routing_key=chosen).read(
            CHAT, sent, "", tokens=True, blocks=True, text=True
        )
        for chosen in ((), kinds)
    )
    assert plain.key is None
    assert keyed.body == plain.body == sent
    assert (keyed.text, keyed.unread, keyed.salt_root) == (plain.text, plain.unread, plain.salt_root)
    assert keyed.blocks.tolist() == plain.blocks.tolist()
    one, other = (None if prompt.tokens is None else prompt.tokens.tolist() for prompt in (plain, keyed))
    assert one == other


@pytest.mark.parametrize("kinds", [(), ("time",)])
async def test_the_same_prompt_at_another_time_goes_to_its_worker_as_it_was_sent(
    engines: list[FakeEngine], start: Start, kinds: tuple[str, ...]
) -> None:
    client = await start(engines, policy="prefix_hash", routing_key=kinds)
    placed, sent = [], []
    for minute in range(10, 22):
        body = json.dumps({"model": "tiny", "messages": asked_at(f"10:{minute}:00")}, indent=1).encode()
        async with client.session.post(f"{client.url}/v1/chat/completions", data=body) as answer:
            await answer.read()
            placed.append(answer.headers["x-prefixwatch-worker"])
        sent.append(body)
    assert (len(set(placed)) == 1) is bool(kinds)
    assert sorted(body for engine in engines for body in engine.bodies if body) == sorted(sent)


async def test_predictions_stay_those_of_the_prompt_itself(engines: list[FakeEngine], start: Start) -> None:
    client = await start(engines, policy="cache_aware", routing_key=("time",))
    predicted = []
    for clock in ("10:00:00", "10:00:01", "10:00:01"):
        async with client.chat(messages=asked_at(clock)) as answer:
            await answer.read()
            predicted.append(int(answer.headers["x-prefixwatch-predicted-tokens"]))
    length = predicted[2]
    assert predicted[0] == 0
    assert 0 < predicted[1] < length // 2  # up to the clock
    assert length > 200


def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValidationError, match="'times' is not a kind of difference: did you mean 'time'"):
        RouterConfig.model_validate({"workers": WORKERS, "routing_key": ["times"]})


def test_policies_of_kv_events_are_refused(tmp_path: Path) -> None:
    events = {"cache_view": {"source": "events"}, "workers": [{**WORKERS[0], "kv_events": "tcp://127.0.0.1:1"}]}
    config = RouterConfig.model_validate({**events, "routing_key": ["time"]})
    with pytest.raises(RouterError, match="leave out routing_key"):
        create_app(config, policy=make_policy("llmd_precise"), tokenizer=TINY)


def test_degradation_goes_without_a_key() -> None:
    with pytest.raises(ValidationError, match="leave out routing_key, or degradation"):
        RouterConfig.model_validate({"workers": WORKERS, "routing_key": ["time"], "degradation": {"enabled": True}})


async def test_moves_look_at_where_keys_went(engines: list[FakeEngine], start: Start) -> None:
    """Blocks of keys are in the view of keys alone: a drained worker would seem to hold nothing of its sessions."""
    client = await start(engines, policy="session", routing_key=["time"], moves={"enabled": True})
    async with client.chat("At 10:00:00: " + "go on " * 40, headers={"x-session-id": "s"}) as answer:
        await answer.read()
        name = answer.headers["x-prefixwatch-worker"]
    async with client.session.post(f"{client.url}/router/workers/{name}/drain") as drained:
        assert (await drained.json())["moves"]["why"] == {"no_connector": 1}


@pytest.mark.parametrize(
    "text",
    [
        " " * 12_000 + "x",
        "<think>" * 8_000,
        "req-" * 10_000,
        "req-" + "1" * 12_000 + "\u00e9",
        "version" + " " * 24_000 + "(",
    ],
    ids=["spaces", "thoughts", "ids", "one id", "version"],
)
@pytest.mark.parametrize("role", ["system", "assistant"])
def test_no_text_takes_a_client_more_time_than_its_length(text: str, role: str) -> None:
    """A router mends what clients send: each of these took seconds, and a thousand times as long at 32 times its
    length."""
    began = process_time()
    assert mended(ChatPrompt(({"role": role, "content": text},)), tuple(KINDS)).messages[0]["content"]
    assert process_time() - began < 0.4
