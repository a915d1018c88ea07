"""Who reused whose blocks, why, and which requests show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.kvcache.blocks import as_tokens, block_hashes, namespace_root
from prefixwatch.kvcache.isolation_findings import (
    ANOTHER_TENANT,
    NOBODY,
    SALTS_IN_A_ROW,
    Finding,
    FindingKind,
    IsolationWatch,
)
from prefixwatch.kvcache.tenant_memory import TenantMemory

BLOCK = 16
PROMPT = list(range(1000, 1400))


class Bench:
    """A router's view: memory and watch, in front of an engine that keeps apart what `key` tells apart."""

    def __init__(self, key: Callable[[str | None], object]) -> None:
        self.watch, self.memory = IsolationWatch(), TenantMemory(10**6, 100)
        self._key = key
        self._cached: dict[object, list[list[int]]] = {}
        self.static: list[Finding] = []

    def ask(self, request: str, tenant: str, salt: str | None, tokens: Sequence[int] = PROMPT) -> Finding | None:
        root, prompt = namespace_root(salt), as_tokens(tokens)
        opening, static = self.watch.sent(request, tenant, root, prompt)
        self.static += [static] if static else []
        sent = self.memory.sent(tenant, prompt, block_hashes(prompt, BLOCK, root=root), BLOCK)
        assert sent is not None
        cached = self._cached.setdefault(self._key(salt), [])
        reused = max((common(tokens, old) for old in cached), default=0) // BLOCK * BLOCK
        cached.append(list(tokens))
        reused = min(reused, (len(tokens) - 1) // BLOCK * BLOCK)
        return self.watch.answered(opening, reused, self.memory.answered(sent, 0, reused), BLOCK)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def isolated(salt: str | None) -> object:
    return salt


def shared(salt: str | None) -> object:
    return None


def test_an_engine_that_ignores_salts() -> None:
    bench = Bench(shared)
    assert bench.ask("r1", "acme", "a") is None
    found = bench.ask("r2", "bolt", "b")
    assert found == Finding(FindingKind.SALT_IGNORED, "bolt", ("r2", "r1"), "acme", 384)
    assert bench.static == []


def test_tenants_without_salts() -> None:
    bench = Bench(isolated)
    assert bench.ask("r1", "acme", None) is None
    assert bench.ask("r2", "bolt", None) == Finding(FindingKind.TENANT_WITHOUT_SALT, "bolt", ("r2", "r1"), "acme", 384)
    assert bench.static == [Finding(FindingKind.TENANT_WITHOUT_SALT, "bolt", ("r2", "r1"), "acme")]


def test_two_tenants_with_one_salt() -> None:
    bench = Bench(isolated)
    bench.ask("r1", "acme", "same")
    assert bench.ask("r2", "bolt", "same") == Finding(FindingKind.SALT_REUSED, "bolt", ("r2", "r1"), "acme", 384)
    assert bench.static == [Finding(FindingKind.SALT_REUSED, "bolt", ("r2", "r1"), "acme")]
    bench.ask("r3", "bolt", "same")
    assert len(bench.static) == 1, "its own last request had it"
    bench.ask("r4", "acme", "same")
    assert bench.static[1:] == [Finding(FindingKind.SALT_REUSED, "acme", ("r4", "r3"), "bolt")]


def test_a_salt_for_each_request() -> None:
    bench = Bench(isolated)
    for k in range(SALTS_IN_A_ROW + 3):
        assert bench.ask(f"r{k}", "acme", f"salt-{k}") is None
    evidence = [(f"r{k}", f"r{k - 1}") for k in range(SALTS_IN_A_ROW - 1, SALTS_IN_A_ROW + 3)]
    assert bench.static == [Finding(FindingKind.SALT_PER_REQUEST, "acme", each) for each in evidence]


def test_salts_that_change_now_and_then_or_alternate_are_not_per_request() -> None:
    bench = Bench(isolated)
    for k in range(40):
        bench.ask(f"r{k}", "acme", f"salt-{k // 2}")  # rotated after every second request
        bench.ask(f"s{k}", "bolt", f"bolt-{k % 2}")
    assert bench.static == []


def test_a_tenants_own_blocks_under_another_salt_show_that_salts_are_ignored() -> None:
    bench = Bench(shared)
    bench.ask("r1", "acme", "monday")
    found = bench.ask("r2", "acme", "tuesday")
    assert found == Finding(FindingKind.SALT_IGNORED, "acme", ("r2", "r1"), "", 384)


def test_blocks_that_nobody_here_sent() -> None:
    watch = IsolationWatch()
    opening, _ = watch.sent("r1", "acme", 7, as_tokens(PROMPT))
    assert watch.answered(opening, 384, 0, BLOCK) == Finding(FindingKind.CROSS_TENANT_HIT, "acme", ("r1",), tokens=384)
    for cached, own in ((None, 0), (384, None), (384, 384), (15, 0)):
        assert watch.answered(opening, cached, own, BLOCK) is None


def test_whether_another_tenant_sent_the_same_opening() -> None:
    """What a sequential test of first tokens needs to know."""
    watch = IsolationWatch()
    long = list(range(600))

    def sent_by(tenant: str, tokens: Sequence[int]) -> str:
        return watch.sent("r", tenant, 1, as_tokens(tokens))[0].sent_by

    assert sent_by("acme", long) == NOBODY
    assert sent_by("bolt", long) == ANOTHER_TENANT
    assert sent_by("bolt", long[:100] + [9] * 500) == "", "only its beginning"
    assert sent_by("bolt", long[::-1]) == NOBODY
    assert sent_by("bolt", long[::-1]) == "", "itself"
    assert sent_by("bolt", long[:63]) == "", "too short to be compared"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.sampled_from([40, 100, 300])), max_size=30),
    st.randoms(use_true_random=False),
)
def test_isolated_tenants_are_never_accused(requests: list[tuple[str, int, int]], rng: object) -> None:
    bench = Bench(isolated)
    for number, (tenant, prompt, length) in enumerate(requests):
        tokens = list(range(prompt * 100_000, prompt * 100_000 + length))
        assert bench.ask(f"r{number}", tenant, f"salt of {tenant}", tokens) is None
    assert bench.static == []


@pytest.mark.parametrize("seed", range(3))
def test_every_planted_leak_is_found_among_many_tenants(seed: int) -> None:
    """50 tenants with salts of their own on an engine that ignores them: a prompt that another tenant sent is a leak,
    and the evidence names that tenant."""
    rng, bench = np.random.default_rng(seed), Bench(shared)
    sent: dict[int, set[str]] = {}
    leaks = 0
    for number in range(300):
        tenant, prompt = f"t{rng.integers(50)}", int(rng.integers(100))
        tokens = list(range(prompt * 100_000, prompt * 100_000 + 300))
        found = bench.ask(f"r{number}", tenant, f"salt of {tenant}", tokens)
        others = sent.get(prompt, set()) - {tenant}
        if others and tenant not in sent.get(prompt, set()):
            assert found is not None
            assert (found.kind, found.other_tenant in others) == (FindingKind.SALT_IGNORED, True)
            leaks += 1
        elif tenant not in sent.get(prompt, set()):
            assert found is None
        sent.setdefault(prompt, set()).add(tenant)
    assert leaks >= 20
