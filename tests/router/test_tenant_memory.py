"""What a tenant has sent before: never too little, so that reuse beyond it is certainly another's."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.kvcache.blocks import Hashes, Tokens, as_tokens, block_hashes, namespace_root
from prefixwatch.kvcache.prediction import longest_common_blocks
from prefixwatch.kvcache.tenant_memory import Sent, TenantMemory

BLOCK = 4


def send(memory: TenantMemory, tenant: str, tokens: list[int], salt: str | None = None) -> Sent:
    prompt = as_tokens(tokens)
    sent = memory.sent(tenant, prompt, block_hashes(prompt, BLOCK, root=namespace_root(salt)), BLOCK)
    assert sent is not None
    return sent


def ask(memory: TenantMemory, tenant: str, tokens: list[int], *, output: int | None = 0, cached: int = 0) -> int | None:
    """Send, and end at once; what the tenant owned of it."""
    return memory.answered(send(memory, tenant, tokens), output, cached)


def test_a_tenant_owns_the_longest_opening_it_sent_in_full_blocks() -> None:
    memory = TenantMemory(1024, 8)
    assert ask(memory, "a", list(range(10))) == 0
    assert ask(memory, "a", [*range(9), 99, 98, 97], cached=8) == 8
    assert ask(memory, "b", list(range(10))) == 0


def test_requests_in_flight_count_as_sent() -> None:
    memory = TenantMemory(1024, 8)
    send(memory, "a", list(range(8)))
    assert ask(memory, "a", [*range(8), 50, 51, 52, 53], cached=8) == 8


def test_another_salt_is_another_opening() -> None:
    memory = TenantMemory(1024, 8)
    send(memory, "a", list(range(8)), salt="one")
    second = send(memory, "a", list(range(8)), salt="two")
    assert memory.answered(second, 0, 0) == 0


def test_a_chat_owns_its_last_answer() -> None:
    """Engines cache what they generate: the next turn finds it there, and nobody else's."""
    memory = TenantMemory(1024, 8)
    ask(memory, "a", list(range(10)), output=6)
    assert ask(memory, "a", [*range(10), *range(20, 30)], cached=16) == 16


def test_a_prompt_that_leaves_the_earlier_one_before_its_end_owns_no_answer() -> None:
    memory = TenantMemory(1024, 8)
    ask(memory, "a", list(range(10)), output=60)
    assert ask(memory, "a", [*range(9), *range(20, 40)], cached=20) == 8


def test_an_answer_found_again_behind_a_prompt_that_shares_only_a_part_of_it() -> None:
    memory = TenantMemory(1024, 8)
    answer = list(range(100, 120))
    ask(memory, "a", list(range(8)), output=20)
    ask(memory, "a", [*range(8), *answer[:4], 1, 2, 3, 4])
    assert ask(memory, "a", [*range(8), *answer, 5], cached=28) == 28


def test_an_answer_of_unknown_length_or_not_over_leaves_it_unknown() -> None:
    memory = TenantMemory(1024, 8)
    ask(memory, "a", list(range(8)), output=None)
    assert ask(memory, "a", [*range(8), *range(20, 30)], cached=16) is None
    memory = TenantMemory(1024, 8)
    running = send(memory, "a", list(range(8)))
    assert ask(memory, "a", [*range(8), *range(20, 30)], cached=16) is None
    memory.answered(running, 2, 0)
    assert ask(memory, "a", [*range(8), *range(30, 40)], cached=16) == 10


def test_what_had_to_be_forgotten_is_unknown_and_no_violation() -> None:
    memory = TenantMemory(128, 8)
    rng = np.random.default_rng(1)
    first = list(range(16))
    ask(memory, "a", first)
    for _ in range(40):
        ask(memory, "a", rng.integers(1000, 2**31, 16).tolist())
    assert ask(memory, "a", first, cached=12) is None
    assert ask(memory, "a", first, cached=12) == 16  # sent again just now, so known again


def test_a_prompt_that_could_not_be_read_leaves_the_rest_unknown() -> None:
    memory = TenantMemory(1024, 8)
    memory.sent_unread("a")
    assert ask(memory, "a", list(range(8)), cached=0) is None
    assert ask(memory, "a", list(range(8)), cached=4) == 8


def test_tenants_beyond_the_limit_are_not_remembered_but_known_ones_always() -> None:
    memory = TenantMemory(1024, 1, known={"acme"})
    blocks: Hashes = np.zeros(0, dtype=np.uint64)
    tokens: Tokens = as_tokens([1])
    assert [memory.sent(name, tokens, blocks, BLOCK) is not None for name in ("x", "y", "acme")] == [True, False, True]


@given(st.lists(st.lists(st.integers(0, 2), max_size=14), max_size=25))
def test_never_less_than_the_longest_common_opening_of_what_was_sent(prompts: list[list[int]]) -> None:
    """Too little would accuse a tenant of its own cache; too much is only less vigilant."""
    memory = TenantMemory(1024, 8)
    earlier: list[Hashes] = []
    for tokens in prompts:
        blocks = block_hashes(as_tokens(tokens), BLOCK)
        own = ask(memory, "a", tokens)
        assert own is not None
        assert own >= min(len(tokens), BLOCK * longest_common_blocks(blocks, earlier))
        earlier.append(blocks)


_STEP = st.tuples(st.integers(0, 100), st.integers(0, 60), st.lists(st.integers(0, 1), max_size=9), st.integers(0, 14))
"""Which earlier request is continued, up to where, with what, and how long the answer is."""


@given(st.lists(_STEP, max_size=25), st.randoms(use_true_random=False))
def test_a_tenant_alone_is_never_accused_whatever_it_continues(
    steps: list[tuple[int, int, list[int], int]], rng: random.Random
) -> None:
    """Its engine caches prompts and answers for ever and reuses them to the token."""
    memory = TenantMemory(1024, 8)
    cached: list[list[int]] = []
    for which, kept, tail, answer in steps:
        earlier = cached[which % len(cached)] if cached else []
        prompt = [*earlier[:kept], *tail]
        reused = max((common(prompt, old) for old in cached), default=0)
        own = ask(memory, "a", prompt, output=answer, cached=reused)
        assert own is not None
        assert reused < own + BLOCK
        cached.append([*prompt, *(rng.randrange(2) for _ in range(answer))])


def common(one: list[int], other: list[int]) -> int:
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
