"""Which conversation a request belongs to, where no header says so."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from prefixwatch.router.config import RouterSettings
from prefixwatch.router.exchange.session_key import session_key
from tests.router.conftest import Start
from tests.router.fake_engine import FakeEngine
from tests.router.test_request_log import page

ALL = ["thread", "cookie:sid", "user", "opening"]


def key(body: Any, keys: list[str] = ALL, cookies: dict[str, str] | None = None, tenant: str = "") -> str:
    return session_key(keys, json.dumps(body).encode(), cookies or {}, tenant)


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts], **fields}


@pytest.mark.parametrize(
    "fields",
    [
        {"conversation": "c1"}, {"conversation": {"id": "c1"}}, {"metadata": {"thread_id": "c1"}},
        {"metadata": {"chat_id": "c1"}, "user": "ann"}, {"user": "ann"},
    ],
)  # fmt: skip
def test_turns_of_a_conversation_have_one_key_and_other_conversations_another(fields: dict[str, Any]) -> None:
    first = key(chat("a", **fields))
    assert len(first) == 32
    assert first == key(chat("a", "b", "c", **fields))
    assert first == key(chat("z", **fields)), "whatever it says"
    other = json.loads(json.dumps(fields).replace("c1", "c2").replace("ann", "bob"))
    assert key(chat("a", **other)) != first
    assert key(chat("a", **fields), tenant="acme") != first


def test_the_first_source_that_is_there_counts() -> None:
    body = chat("a", conversation="c1", user="ann")
    cookies = {"sid": "s"}
    found = [key(body, keys, cookies) for keys in (["thread"], ["cookie:sid"], ["user"], ["opening"])]
    assert len(set(found)) == 4
    assert [key(body, keys, cookies) for keys in (ALL, ALL[1:], ALL[2:], ALL[3:])] == found
    assert key(chat("a", user="ann"), ALL) == key(chat("b", user="ann"), ["user"])
    assert key(body, ["cookie:other"], cookies) == ""


def test_a_user_of_two_threads_has_two_conversations() -> None:
    one, two = (chat("a", user="ann", metadata={"thread_id": name}) for name in ("1", "2"))
    assert key(one) != key(two)
    assert key({**one, "user": "bob"}) != key(one)


SYSTEM = {"messages": [{"role": "system", "content": "sys"}, {"role": "user", "content": "q1"}]}


@pytest.mark.parametrize(
    ("first", "later", "other"),
    [
        (chat("q1"), chat("q1", "answer", "q2"), chat("q2")),
        (SYSTEM, {"messages": [*SYSTEM["messages"], {"role": "assistant", "content": "a"}]}, chat("sys", "q1")),
        ({"input": ["q1"]}, {"input": ["q1", "a", "q2"]}, {"input": ["x"]}),
        ({"input": "q1"}, {"input": "q1"}, {"input": "q2"}),
        ({"prompt": "p" * 600}, {"prompt": "p" * 600 + "more"}, {"prompt": "q" * 600}),
    ],
)
def test_an_opening_stays_the_same_as_the_conversation_grows(first: Any, later: Any, other: Any) -> None:
    assert key(first) == key(later) != key(other)


ANYTHING = st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda one: st.lists(one, max_size=3))


@given(st.dictionaries(st.sampled_from(["user", "conversation", "metadata", "messages", "prompt"]), ANYTHING))
def test_no_body_breaks_it(body: dict[str, Any]) -> None:
    assert len(key(body)) in (0, 32)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b"null", b'{"messages": []}', b'{"user": 5, "prompt": ""}', b"\xff"]
)
def test_a_body_without_any_key_has_none(body: bytes) -> None:
    assert session_key(ALL, body, {}, "acme") == ""


@pytest.mark.parametrize("keys", [["session"], ["cookie:"], ["Header"]])
def test_unknown_keys_are_refused(keys: list[str]) -> None:
    with pytest.raises(ValidationError, match="is not a session key: use header, thread, user, opening or cookie:NAME"):
        RouterSettings(session_keys=keys)


async def test_records_and_counts_follow_the_configured_order(start: Start, engines: list[FakeEngine]) -> None:
    client = await start(engines[:1], session_keys=["header", "user"])
    for headers, fields in (
        ({"x-session-id": "s"}, {"user": "ann"}),
        ({}, {"user": "ann"}),
        ({}, {"user": "ann"}),
        ({}, {}),
    ):
        async with client.chat(headers=headers, **fields) as answer:
            await answer.read()
    named, ann, again, none = [record.session for record in (await page(client)).records]
    assert ann == again
    assert len({named, ann, none}) == 3
    assert none == ""
    assert client.value("sessionless_requests_total") == 1
