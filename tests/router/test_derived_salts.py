"""Salts derived from who a tenant is, and what clients write into a body in their place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.router.exchange.namespaces import Namespaces, framed, with_only_this_salt

names = st.text(max_size=20)


@given(st.lists(names, max_size=4), st.lists(names, max_size=4))
def test_different_parts_are_never_framed_alike(one: list[str], other: list[str]) -> None:
    assert (framed(*one) == framed(*other)) is (one == other)


@given(names, names, st.binary(min_size=1, max_size=40))
def test_two_tenants_have_one_salt_only_within_a_trust_group(one: str, other: str, key: bytes) -> None:
    alone = Namespaces(key, {})
    assert (alone.salt(one) == alone.salt(other)) is (one == other)
    together = Namespaces(key, {"friends": [one, other]})
    assert together.salt(one) == together.salt(other)
    assert together.salt(one) not in (alone.salt(one), alone.salt("friends"), alone.salt("group"))
    assert Namespaces(key + b"2", {}).salt(one) != alone.salt(one)


CHOSEN_NAMES = [
    "cache_salt",
    "Cache_Salt",
    "CACHE-SALT",
    "ｃａｃｈｅ_ｓａｌｔ",
    " cache_salt ",
    "extra_key",
    "kv_transfer_params",
]
CHOSEN = st.sampled_from(CHOSEN_NAMES)
ANYTHING = st.recursive(
    st.none() | st.integers() | names, lambda inner: st.lists(inner) | st.dictionaries(CHOSEN, inner)
)


def keys_in(value: Any) -> list[str]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [*(value if isinstance(value, dict) else ()), *(key for one in inner for key in keys_in(one))]


@given(
    st.dictionaries(CHOSEN | names, ANYTHING, max_size=6),
    st.dictionaries(st.sampled_from(["extra_body", "vllm_xargs", "nvext", "sampling_params"]), ANYTHING, max_size=3),
    st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate"]),
)
def test_no_salt_of_a_client_survives_in_a_body(fields: dict[str, Any], more: dict[str, Any], path: str) -> None:
    evil = json.dumps({**fields, **more, "messages": [{"role": "user", "content": "cache_salt"}]})
    sent = json.loads(with_only_this_salt(evil.encode(), path, "OWN"))
    assert sent.pop("cache_salt") == "OWN"
    assert sent.pop("extra_key", "OWN") == "OWN"
    assert "kv_transfer_params" not in sent
    assert sent["messages"] == [{"role": "user", "content": "cache_salt"}]
    assert not any(key in CHOSEN_NAMES for name in more for key in keys_in(sent[name]))


@pytest.mark.parametrize(
    "body",
    [
        b'{"cache_salt": "OWN", "cache_salt": "evil", "messages": []}',
        b'{"cache_salt": "evil", "cache_salt": "OWN", "messages": []}',
        b'{"cache\\u005fsalt": "evil", "messages": []}',
        b'{"cache_salt": ["evil"], "messages": []}',
        b'{"cache_salt": {"a": 1}, "extra_key": ["x", "y"], "messages": []}',
        b'{"cache_salt": 5, "messages": []}',
    ],
)
def test_doubled_escaped_and_wrongly_typed_salts_are_replaced(body: bytes) -> None:
    assert with_only_this_salt(body, "/v1/chat/completions", "OWN") == b'{"messages":[],"cache_salt":"OWN"}'


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
@pytest.mark.parametrize("prompts", [["a" * 64, "b" * 64], [[1, 2, 3], [4, 5, 6]]])
def test_each_prompt_of_a_batch_is_in_the_derived_namespace(path: str, prompts: list[Any]) -> None:
    field = "prompt" if path == "/v1/completions" else "text"
    evil = [{"cache_salt": "evil"}, {"extra_key": "evil"}]
    body = {field: prompts, "cache_salt": ["OWN", "evil"], "extra_key": ["evil", "evil"], "sampling_params": evil}
    sent = json.loads(with_only_this_salt(json.dumps(body).encode(), path, "OWN"))
    assert sent[field] == prompts
    assert sent["cache_salt"] == "OWN", "one salt for all prompts, and no list"
    assert "evil" not in str(sent)
