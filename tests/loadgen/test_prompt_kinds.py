"""What each kind of prompt is made of; that its expected hits are exact shows tests/stack/test_expected_hits.py."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from prefixwatch.documents import parse
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.loadgen.plan.planner import make_plan
from prefixwatch.loadgen.plan.prompts import PromptWriter
from prefixwatch.loadgen.plan.request import PlannedRequest
from prefixwatch.loadgen.scenario.model import Scenario

FLAT = "count: 3, shared_tokens: 64, "
BASE = """\
name: kind
duration_seconds: 40
arrivals: {{rate_per_second: 5}}
groups: {{{opening}unique_tokens: 16, output_tokens: 4}}
"""


def requests_of(writer: PromptWriter, more: str = "", opening: str = FLAT, seed: int = 1) -> list[PlannedRequest]:
    scenario = parse(BASE.format(opening=opening) + more, Scenario, name="kind.yaml")
    return make_plan(scenario, writer, seed=seed, nonce="n", model="m").requests


def words(text: str, start: int = 0, count: int | None = None) -> list[str]:
    own = text.removeprefix("Text:").split()[start:]
    return own if count is None else own[:count]


def system(request: PlannedRequest) -> str:
    return str(request.messages[0]["content"])


def test_nested_openings_share_as_far_as_their_paths_agree(writer: PromptWriter) -> None:
    nesting = "nesting: [{name: company, count: 2, tokens: 40}, {name: product, count: 2, tokens: 30}], "
    requests = requests_of(writer, opening=nesting)
    assert {request.group for request in requests} == {"g0.0", "g0.1", "g1.0", "g1.1"}
    by_group = {request.group: words(system(request)) for request in requests}
    assert {len(own) for own in by_group.values()} == {70}
    assert by_group["g0.0"][:40] == by_group["g0.1"][:40]
    assert by_group["g0.0"][40:] != by_group["g0.1"][40:]
    assert by_group["g0.0"][:40] != by_group["g1.0"][:40]


def test_lengths_follow_their_distribution(writer: PromptWriter) -> None:
    opening = "count: 1, shared_tokens: {values: [30, 90], weights: [0, 1]}, "
    requests = requests_of(writer, "sessions: {later_tokens: 5, turns: 2, think_seconds: 1}", opening=opening)
    assert {len(words(system(request))) for request in requests} == {90}
    assert {len(words(request.messages[-1]["content"])) for request in requests if request.turn} == {5}


def test_documents_open_user_messages_in_varying_or_fixed_order(writer: PromptWriter) -> None:
    varying, fixed = (
        requests_of(writer, f"documents: {{count: 3, per_turn: 2, tokens: 20, order: {order}}}")
        for order in ("varying", "fixed")
    )
    openings = [{tuple(words(r.messages[-1]["content"], 0, 40)) for r in own} for own in (varying, fixed)]
    assert [len(own) for own in openings] == [6, 3]
    assert {len(words(r.messages[-1]["content"])) for r in varying} == {56}


def test_examples_and_tools_stand_before_and_after_the_prefix(writer: PromptWriter) -> None:
    plain = {r.group: words(system(r)) for r in requests_of(writer)}
    more = "tools: {count: 2, tokens: 10}\nfew_shot: {pool: 2, shots: 2, tokens: 7}\n"
    for request in requests_of(writer, more):
        own = words(system(request))
        assert len(own) == 20 + 64 + 14
        assert own[20:84] == plain[request.group]


def test_shuffled_tools_part_prompts_at_their_head(writer: PromptWriter) -> None:
    requests = requests_of(writer, "tools: {count: 4, tokens: 10, shuffled_share: 0.25}")
    orders = Counter(tuple(words(system(r), 0, 40)) for r in requests)
    usual = orders.most_common(1)[0][1] / len(requests)
    assert 0.7 < usual < 0.85
    assert len({frozenset(order) for order in orders}) == 1


def test_tools_as_a_field_keep_their_names_in_any_order_and_leave_the_system_message(writer: PromptWriter) -> None:
    shuffled = "tools: {count: 4, tokens: 10, sent_as: field, shuffled_share: 0.25}"
    requests = requests_of(writer, shuffled)
    told = [{f["function"]["name"]: f["function"]["description"] for f in r.tools or []} for r in requests]
    assert set(told[0]) == {"tool_0", "tool_1", "tool_2", "tool_3"}
    assert {len(words(text)) for text in told[0].values()} == {10}
    assert all(own == told[0] for own in told)
    assert len({tuple(own) for own in told}) > 4
    assert {len(words(system(r))) for r in requests} == {64}
    assert {r.tool_choice for r in requests} == {"none"}
    assert {r.tool_choice for r in requests_of(writer)} == {None}


@pytest.mark.parametrize(("per", "fronts_a_session"), [("request", 3), ("session", 1)])
def test_a_dynamic_field_stands_in_front_of_everything(writer: PromptWriter, per: str, fronts_a_session: int) -> None:
    more = f"dynamic_front: {{tokens: 6, per: {per}}}\nsessions: {{turns: 3, think_seconds: 1}}"
    requests = [r for r in requests_of(writer, more) if r.session == "s0"]
    assert len({tuple(words(system(r), 0, 6)) for r in requests}) == fronts_a_session
    assert len({tuple(words(system(r), 6)) for r in requests}) == 1


def test_a_roll_out_changes_the_prefix_of_later_sessions_from_where_it_says(writer: PromptWriter) -> None:
    requests = requests_of(writer, "rollout: {at_seconds: 20, keeps_tokens: 24}")
    for group in ("g0", "g1", "g2"):
        versions = [{tuple(words(system(r))) for r in requests if r.group == group and late == (r.scheduled_s >= 20)}
                    for late in (False, True)]  # fmt: skip
        ((old,), (new,)) = versions
        assert old[:24] == new[:24]
        assert old[24:] != new[24:]
        assert len(old) == len(new) == 64


def test_a_slow_roll_out_mixes_both_versions(writer: PromptWriter) -> None:
    requests = requests_of(writer, "rollout: {at_seconds: 10, over_seconds: 20}")
    new = {tuple(words(system(r))) for r in requests if r.scheduled_s > 30}
    share = [sum(tuple(words(system(r))) in new for r in requests if a <= r.scheduled_s < b) for a, b in
             ((0, 10), (10, 20), (20, 30))]  # fmt: skip
    assert share[0] == 0
    assert 0 < share[1] < share[2]


def test_a_flash_crowd_comes_on_top_with_a_prefix_of_its_own(writer: PromptWriter) -> None:
    base, more = (
        requests_of(writer, flash)
        for flash in ("", "flash_crowd: {at_seconds: 10, seconds: 5, rate_per_second: 12, tokens: 200}")
    )
    crowd = [r for r in more if r.group == "flash"]
    assert len(crowd) == pytest.approx(60, rel=0.4)
    assert all(10 <= r.scheduled_s < 15 for r in crowd)
    assert len({system(r) for r in crowd}) == 1
    rest = [replace(r, index=0, shared_tokens=0) for r in more if r.group != "flash"]
    assert rest == [replace(r, index=0, shared_tokens=0) for r in base]


def test_branches_share_all_that_was_said_before_the_fork(writer: PromptWriter) -> None:
    requests = requests_of(writer, "sessions: {turns: 3, think_seconds: 2, forks: {share: 1, branches: 3}}")
    first = {r.turn: r for r in requests if r.session == "s0"}
    branch = {r.turn: r for r in requests if r.session == "s0f1"}
    fork = min(branch)
    assert set(branch) == set(range(fork, 3))
    assert branch[fork].scheduled_s == first[fork].scheduled_s
    assert branch[fork].messages[:-1] == first[fork].messages[:-1]
    assert branch[fork].messages[-1] != first[fork].messages[-1]
    assert {r.session for r in requests if r.session.startswith("s0f")} == {"s0f1", "s0f2"}


def test_a_hand_over_keeps_the_user_and_changes_the_session(writer: PromptWriter) -> None:
    requests = requests_of(writer, "sessions: {turns: 3, think_seconds: 2, handover_share: 1}")
    own = sorted((r for r in requests if r.headers["x-user-id"] == "u0"), key=lambda r: r.turn)
    assert {r.session for r in own} == {"s0", "s0-b"}
    assert own[-1].messages[: len(own[0].messages)] == own[0].messages


def test_tenants_carry_salt_priority_headers_class_and_models(writer: PromptWriter) -> None:
    requests = requests_of(
        writer,
        "tenants:\n"
        "  - {name: a, weight: 3, salt: sa, priority: 1, headers: {x-plan: gold}, request_class: batch}\n"
        "  - {name: b, models: [{name: lora-1}, {name: base, weight: 3}]}\n",
    )
    a, b = ([r for r in requests if r.tenant == name] for name in "ab")
    assert len(a) / len(requests) == pytest.approx(0.75, abs=0.08)
    assert {(r.salt, r.priority, r.headers["x-plan"], r.request_class, r.model) for r in a} == {
        ("sa", 1, "gold", "batch", "")
    }
    assert Counter(r.model for r in b)["base"] / len(b) == pytest.approx(0.75, abs=0.15)
    assert {(r.salt, r.priority, r.request_class) for r in b} == {(None, None, "interactive")}


def test_a_closed_loop_plans_its_number_of_requests(writer: PromptWriter) -> None:
    text = BASE.format(opening=FLAT).replace("{rate_per_second: 5}", "{kind: closed, concurrency: 4, requests: 25}")
    scenario = parse(text + "sessions: {turns: 2}", Scenario, name="kind.yaml")
    plan = make_plan(scenario, writer, seed=1, nonce="n", model="m")
    assert (len(plan.requests), plan.loop, plan.concurrency) == (25, "closed", 4)


MOONCAKE = """\
{"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 4000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 9]}
{"timestamp": 9000, "input_length": 4, "output_length": 1, "hash_ids": [7]}
{"timestamp": 90000, "input_length": 600, "output_length": 1, "hash_ids": [0, 5]}
"""


def replayed(writer: PromptWriter, folder: Path, log: str, more: str = "") -> list[PlannedRequest]:
    (folder / "log").write_text(log)
    text = f"name: r\nduration_seconds: 20\nreplay: {{file: {folder / 'log'}, speed: 2}}\n{more}"
    scenario = parse(text, Scenario, name="r.yaml")
    return make_plan(scenario, writer, seed=1, nonce="n", model="m").requests


def test_block_ids_become_text_of_the_right_length_that_shares_what_the_ids_share(
    writer: PromptWriter, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    first, second, tiny = replayed(writer, tmp_path, MOONCAKE)
    assert [request.scheduled_s for request in (first, second, tiny)] == [0, 2, 4.5]
    assert [len(tokenizer.encode_chat(r.messages)) for r in (first, second)] == [1500, 1100]
    assert (first.max_tokens, second.max_tokens) == (5, 7)
    assert second.shared_tokens == _head(writer) + 1024
    assert len(words(tiny.messages[0]["content"])) == 1  # shorter than the chat template itself: as short as can be


def _head(writer: PromptWriter) -> int:
    """Tokens of the template before the words of a user message."""
    word = writer.alphabet.draw(1, "x")
    tokens: list[int] = writer.tokens([("user", word)]).tolist()
    return tokens.index(int(writer.alphabet.ids[word[0]]))


def test_recorded_texts_are_sent_as_they_are(writer: PromptWriter, tokenizer: Tokenizer, tmp_path: Path) -> None:
    log = (
        '{"timestamp": 5, "messages": [{"role": "user", "content": "héllo 中 wörld"}], '
        '"max_tokens": 3, "user": "acme"}\n'
        '{"timestamp": 6, "session_id": "s", "messages": [{"role": "user", "content": "héllo 中 wörld"}]}\n'
    )
    first, second = replayed(writer, tmp_path, log, "tenants: [{name: acme, priority: 2}]\n")
    assert first.messages == [{"role": "user", "content": "héllo 中 wörld"}]
    assert first.prompt_tokens == second.shared_tokens == len(tokenizer.encode_chat(first.messages))
    assert (first.tenant, first.priority, first.max_tokens) == ("acme", 2, 3)
    assert (second.session, second.max_tokens) == ("s", 128)


def test_recorded_tools_are_sent_and_counted(writer: PromptWriter, tokenizer: Tokenizer, tmp_path: Path) -> None:
    tools = '[{"type": "function", "function": {"name": "search", "description": "finds"}}]'
    chat = '"messages": [{"role": "user", "content": "hi"}]'
    log = f'{{"timestamp": 5, {chat}, "tools": {tools}, "tool_choice": "none"}}\n{{"timestamp": 6, {chat}}}\n'
    first, second = replayed(writer, tmp_path, log)
    assert first.tools == json.loads(tools)
    assert (first.tool_choice, second.tools, second.tool_choice) == ("none", None, None)
    assert first.prompt_tokens == len(tokenizer.encode_chat(first.messages, tools=first.tools))
    assert second.prompt_tokens == len(tokenizer.encode_chat(first.messages)) < first.prompt_tokens


def test_lengths_alone_become_prompts_that_share_nothing(writer: PromptWriter, tmp_path: Path) -> None:
    log = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,300,10\n2023-11-16 18:17:04,300,1\n"
    first, second = replayed(writer, tmp_path, log)
    assert (first.prompt_tokens, second.prompt_tokens) == (300, 300)
    assert second.shared_tokens < 16


def test_arrivals_of_a_trace_go_with_drawn_prompts(writer: PromptWriter, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(MOONCAKE)
    arrivals = f"{{kind: trace, file: {tmp_path / 'log'}, speed: 2}}"
    text = BASE.format(opening=FLAT).replace("{rate_per_second: 5}", arrivals)
    plan = make_plan(parse(text, Scenario, name="t.yaml"), writer, seed=1, nonce="n", model="m")
    assert [request.scheduled_s for request in plan.requests] == [0, 2, 4.5]
