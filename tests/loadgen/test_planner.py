from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.documents import parse
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.kvcache.reuse import SeenOpenings
from prefixwatch.loadgen.plan.planner import make_plan
from prefixwatch.loadgen.plan.prompts import PromptWriter
from prefixwatch.loadgen.plan.request import Plan
from prefixwatch.loadgen.scenario.model import Scenario, load_scenario

BASE = """\
name: t
duration_seconds: 20
arrivals: {rate_per_second: 5}
groups: {count: 3, popularity: {zipf: 1}, shared_tokens: 64, unique_tokens: 16, output_tokens: 4}
"""


def scenario_of(more: str = "") -> Scenario:
    return parse(BASE + more, Scenario, name="t.yaml")


def plan_of(writer: PromptWriter, scenario: Scenario, *, seed: int = 1, nonce: str = "a") -> Plan:
    return make_plan(scenario, writer, seed=seed, nonce=nonce, model="m")


def without_text(plan: Plan) -> list[object]:
    return [replace(request, messages=[]) for request in plan.requests]


@pytest.mark.parametrize("name", ["smoke", "shared-prefix", "no-shared-prefix"])
def test_prompt_tokens_are_what_the_model_counts(tokenizer: Tokenizer, writer: PromptWriter, name: str) -> None:
    plan = plan_of(writer, load_scenario(name))
    for request in plan.requests[::7]:
        assert len(tokenizer.encode_chat(request.messages)) == request.prompt_tokens


def test_shared_tokens_is_the_longest_opening_seen_in_the_namespace(tokenizer: Tokenizer, writer: PromptWriter) -> None:
    tenants = "tenants: [{name: a, salt: sa}, {name: b, salt: sb}, {name: c, salt: sa}]\n"
    plan = plan_of(writer, scenario_of(tenants + "sessions: {turns: {1: 1, 3: 1}, think_seconds: 2}\nprime: true\n"))
    seen: dict[str | None, list[list[int]]] = {}
    for request in plan.requests:
        tokens = tokenizer.encode_chat(request.messages).tolist()
        earlier = seen.setdefault(request.salt, [])
        common = (
            next(
                (i for i, (x, y) in enumerate(zip(tokens, other, strict=False)) if x != y), min(len(tokens), len(other))
            )
            for other in earlier
        )
        assert request.shared_tokens == max(common, default=0)
        earlier.append(tokens)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), max_size=12))
def test_the_sorted_neighbours_have_the_longest_common_opening(prompts: list[list[int]]) -> None:
    openings = SeenOpenings()
    for position, prompt in enumerate(prompts):
        expected = 0
        for other in prompts[:position]:
            same = [x == y for x, y in zip(prompt, other, strict=False)]
            expected = max(expected, same.index(False) if False in same else len(same))
        assert openings.add(np.array(prompt, dtype=np.uint32)) == expected


def test_the_same_seed_and_nonce_give_the_same_plan(writer: PromptWriter) -> None:
    assert plan_of(writer, load_scenario("smoke")) == plan_of(writer, load_scenario("smoke"))


def test_another_nonce_changes_the_words_and_nothing_else(writer: PromptWriter) -> None:
    """vllm-project/vllm#52884 (LT01): a second run must not find the first run's prompts in the cache."""
    first, second = (plan_of(writer, scenario_of(), nonce=nonce) for nonce in ("a", "b"))
    assert [r.scheduled_s for r in first.requests] == [r.scheduled_s for r in second.requests]
    assert [(r.group, r.tenant, r.prompt_tokens, r.max_tokens) for r in first.requests] == [
        (r.group, r.tenant, r.prompt_tokens, r.max_tokens) for r in second.requests
    ]
    opening = len("Text:") + 40
    starts = [{r.messages[0]["content"][:opening] for r in plan.requests} for plan in (first, second)]
    assert not starts[0] & starts[1]


def test_a_warm_scenario_repeats_its_words_in_every_run(writer: PromptWriter) -> None:
    scenario = scenario_of("warm: true\n")
    assert plan_of(writer, scenario, nonce="a") == plan_of(writer, scenario, nonce="b")


def test_another_seed_changes_the_schedule(writer: PromptWriter) -> None:
    scenario = scenario_of()
    assert without_text(plan_of(writer, scenario, seed=1)) != without_text(plan_of(writer, scenario, seed=2))


def test_a_later_turn_sends_the_conversation_so_far(writer: PromptWriter) -> None:
    """kubernetes-sigs/inference-perf#649 (LT02): answers are replayed as planned and don't count as shared."""
    plan = plan_of(writer, scenario_of("sessions: {turns: 2, think_seconds: 3}\n"))
    first, second = (r for r in plan.requests if r.session == "s0")
    assert second.scheduled_s == pytest.approx(first.scheduled_s + 3)
    assert second.messages[: len(first.messages)] == first.messages
    assert [m["role"] for m in second.messages] == ["system", "user", "assistant", "user"]
    assert second.messages[2]["content"].count(" ") == first.max_tokens
    assert second.shared_tokens == first.prompt_tokens


def test_requests_come_in_order_of_time_and_none_after_the_end(writer: PromptWriter) -> None:
    plan = plan_of(writer, scenario_of("sessions: {turns: 4, think_seconds: 6}\n"))
    times = [request.scheduled_s for request in plan.requests]
    assert times == sorted(times)
    assert times[-1] < 20
    assert [request.index for request in plan.requests] == list(range(len(times)))


def test_the_prime_phase_has_one_request_a_group_and_tenant(writer: PromptWriter) -> None:
    """sgl-project/sglang#37359 (LT22): priming is a phase of its own, before the measured one."""
    plan = plan_of(writer, scenario_of("prime: true\ntenants: [{name: a, salt: s}, {name: b}]\n"))
    primes = [request for request in plan.requests if request.phase == "prime"]
    assert plan.requests[: len(primes)] == primes
    assert [(r.tenant, r.group) for r in primes] == [(t, f"g{g}") for t in "ab" for g in range(3)]
    measured = plan.requests[len(primes) :]
    assert min(request.shared_tokens for request in measured) >= 64


def test_without_groups_nothing_but_the_template_is_shared(writer: PromptWriter) -> None:
    plan = plan_of(writer, load_scenario("no-shared-prefix"))
    assert max(request.shared_tokens for request in plan.requests) < 16


def test_zipf_popularity_follows_the_exponent(writer: PromptWriter) -> None:
    plan = plan_of(writer, parse(BASE.replace("rate_per_second: 5", "rate_per_second: 100"), Scenario, name="t.yaml"))
    counts = [sum(r.group == f"g{g}" for r in plan.requests) for g in range(3)]
    total = sum(counts)
    for count, share in zip(counts, (6 / 11, 3 / 11, 2 / 11), strict=True):
        assert count / total == pytest.approx(share, abs=0.04)


def test_rate_counts_all_turns(writer: PromptWriter) -> None:
    text = BASE.replace("rate_per_second: 5", "rate_per_second: 60").replace(
        "duration_seconds: 20", "duration_seconds: 60"
    )
    plan = plan_of(writer, parse(text + "sessions: {turns: 2, think_seconds: 0.1}\n", Scenario, name="t.yaml"))
    assert len(plan.requests) == pytest.approx(3600, rel=0.06)
