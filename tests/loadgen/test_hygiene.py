"""Causes of lost reuse by kind, reuse without each, and what other evictions could reuse."""

from __future__ import annotations

import copy
import json
import random
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.kvcache.blocks import Tokens
from prefixwatch.kvcache.prompts.mending import KINDS, ChatPrompt, mended
from prefixwatch.kvcache.reuse import reuse_profile
from prefixwatch.loadgen.hygiene.causes import ALL, SentPrompt, diagnose
from prefixwatch.loadgen.hygiene.evictions import hit_blocks

RULES = "Answer in one sentence and name your sources. " * 20


def encode(prompt: ChatPrompt) -> Tokens:
    """A token per character of the prompt's JSON: tools first, as templates do."""
    return np.frombuffer(json.dumps([prompt.tools, list(prompt.messages)]).encode(), dtype=np.uint8).astype(np.uint32)


def sent(messages: list[dict[str, Any]], tools: Any = None, **own: Any) -> SentPrompt:
    prompt = ChatPrompt(tuple(messages), tools)
    return SentPrompt(prompt, encode(prompt), **own)


def chat(system: Any, user: str = "Hello") -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"a": 1, "b": 2}}} for name in "abcdefgh"]


def shuffled(k: int) -> list[Any]:
    return random.Random(k).sample(TOOLS, len(TOOLS))


def thinking(k: int) -> list[dict[str, Any]]:
    """Even requests still have the thought of the first answer, odd ones have lost it."""
    thought = "<think>the user greets me</think>\n" if k % 2 == 0 else ""
    return [*chat("Be kind."), {"role": "assistant", "content": f"{thought}Hi."}, {"role": "user", "content": RULES}]


def image(k: int) -> list[dict[str, Any]]:
    picture = {"type": "image_url", "image_url": {"url": f"http://pictures/{k}.png"}}
    return [{"role": "user", "content": [picture, {"type": "text", "text": RULES}]}]


CASES: dict[str, Any] = {
    "time": lambda k: sent(chat(f"It is 2026-11-30T21:{k:02}:07Z. {RULES}")),
    "id": lambda k: sent(chat(f"Request id: 8f{k:02}c6d2-1b7e-4c7f-9a53-0d1c2b3a4f5e. {RULES}")),
    "billing": lambda k: sent(chat(f"x-anthropic-billing-header: cc_version=2; cch={k:05x};\n{RULES}")),
    "tools": lambda k: sent(chat(RULES), shuffled(k)),
    "version": lambda k: sent(chat(f"Assistant v1.{k}.0. {RULES}")),
    "media": lambda k: sent(image(k)),
    "thoughts": lambda k: sent(thinking(k)),
    "spelling": lambda k: sent(chat("Be brief.\r\n" * (k % 2) + "Be brief.\n" * (1 - k % 2) + RULES)),
    "namespace": lambda k: sent(chat(RULES), model=f"m{k % 2}"),
}


@pytest.mark.parametrize("kind", CASES)
def test_each_kind_is_named_with_its_tokens_and_the_reuse_after(kind: str) -> None:
    prompts = [CASES[kind](k) for k in range(10)]
    found = diagnose(prompts, encode, 16)
    assert [cause.kind for cause in found.causes] == [kind]
    [cause] = found.causes
    worth = 800 if kind not in {"thoughts", "spelling", "namespace"} else 0  # these differ between two halves only
    assert cause.lost_tokens > max(worth, 0.5 * len(RULES))
    assert (cause.ratio_after or 0.0) > (found.hit_ratio or 0.0) + 0.05
    if kind in KINDS:
        better = [mended(prompt.prompt, [kind]) for prompt in prompts]
        again = [SentPrompt(prompt, encode(prompt)) for prompt in better]
        assert diagnose(again, encode, 16).hit_ratio == cause.ratio_after


def test_every_kind_has_a_case() -> None:
    assert set(CASES) == {*KINDS, "namespace"}


def test_kinds_that_hide_each_other_are_worth_more_together() -> None:
    """A time stamp in front, an id behind it: each alone gains little."""
    prompts = [
        sent(chat(f"2026-11-30 21:{k:02}:07 {'x' * 64} request id: r-{k:04}-abc {RULES}"), tenant=f"t{k % 2}")
        for k in range(10)
    ]
    found = diagnose(prompts, encode, 16)
    together = found.causes[-1]
    assert [cause.kind for cause in found.causes] == ["time", "id", ALL]
    assert all((cause.ratio_after or 0) < 0.2 for cause in found.causes[:-1])
    assert (together.ratio_after or 0) > 0.8
    assert together.lost_tokens >= max(cause.lost_tokens for cause in found.causes[:-1])
    assert {t.tenant: t.requests for t in found.tenants} == {"t0": 5, "t1": 5}
    assert all((t.ratio_after or 0) > 0.7 for t in found.tenants)
    assert all((t.hit_ratio or 0) < 0.1 for t in found.tenants)


def test_smaller_blocks_never_reuse_less() -> None:
    prompts = [sent(chat(RULES, f"Question {k}")) for k in range(6)]
    ratios = list(diagnose(prompts, encode, 16).by_block_size.items())
    assert [size for size, _ in ratios] == [16, 32, 64, 128]
    found = [ratio or 0.0 for _, ratio in ratios]
    assert found == sorted(found, reverse=True)


texts = st.text(st.sampled_from("ab 01:-/.\r\n<think>x2026v"), max_size=40)
parts = st.one_of(
    texts.map(lambda text: {"type": "text", "text": text}),
    st.just({"type": "image_url", "image_url": {"url": "http://x/2026-01-01.png"}}),
    st.just({"type": "text"}),
)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant"]),
            "content": st.one_of(texts, st.lists(parts), st.none()),
        }
    ),
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(messages, st.sampled_from([None, TOOLS, "odd"]), st.lists(st.sampled_from(sorted(KINDS)), unique=True))
def test_mending_never_changes_what_was_given_and_is_stable(given_: Any, tools: Any, kinds: list[str]) -> None:
    before = copy.deepcopy((given_, tools))
    once = mended(ChatPrompt(tuple(given_), tools), kinds)
    assert (given_, tools) == before
    assert mended(once, kinds) == once
    assert [m["role"] for m in once.messages] == [m["role"] for m in given_]


def best(rows: list[tuple[int, ...]], capacity: int) -> int:
    """The most that any eviction reuses, by trying all: blocks kept after each prompt, closed under predecessors."""
    states: dict[frozenset[tuple[int, ...]], int] = {frozenset(): 0}
    for row in rows:
        own = [row[: k + 1] for k in range(len(row))]
        following: dict[frozenset[tuple[int, ...]], int] = {}
        for held, hits in states.items():
            gained = hits + next((k for k, block in enumerate(own) if block not in held), len(own))
            everything = sorted(held | set(own))
            for choice in product((False, True), repeat=len(everything)):
                kept = frozenset(block for block, keep in zip(everything, choice, strict=True) if keep)
                if len(kept) == min(capacity, len(everything)) and all(b[:-1] in kept or len(b) == 1 for b in kept):
                    following[kept] = max(following.get(kept, 0), gained)
        states = following
    return max(states.values())


prompts_ = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=2).map(tuple), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(prompts_, st.integers(1, 4))
def test_the_clairvoyant_bound_is_the_best_of_all_evictions(rows: list[tuple[int, ...]], capacity: int) -> None:
    hashed = [np.array([hash((0, *row[: k + 1])) % 2**62 for k in range(len(row))], dtype=np.uint64) for row in rows]
    bound = hit_blocks(hashed, capacity, "clairvoyant")
    assert bound == best(rows, capacity)
    assert hit_blocks(hashed, capacity, "frequency") <= bound
    assert reuse_profile(hashed).hit_blocks(capacity) <= bound


def test_a_scan_costs_lru_what_frequency_keeps() -> None:
    """An opening that all have, and tails that nobody has again."""
    hot = list(range(1, 5))
    rows = [np.array([*hot, *range(100 * k, 100 * k + 8)], dtype=np.uint64) for k in range(1, 20)]
    once = [np.array(range(10_000 + 20 * k, 10_020 + 20 * k), dtype=np.uint64) for k in range(1, 20)]
    mixed = [row for pair in zip(rows, once, strict=True) for row in pair]
    assert reuse_profile(mixed).hit_blocks(8) == 0
    assert hit_blocks(mixed, 8, "clairvoyant") == 18 * 4
    assert hit_blocks(mixed, 8, "frequency") == 17 * 4  # the first scan finds all equally rare
