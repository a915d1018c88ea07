"""Reuse by block class, by named prefix and by session, and the weighted figure: exact sums, intervals, verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from prefixwatch.documents import DocumentError, parse
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.grading.model import ReuseGrade
from prefixwatch.loadgen.grading.summary import RunFacts, build_summary, verdict_sentence
from prefixwatch.loadgen.plan.planner import planned_prompts
from prefixwatch.loadgen.plan.prompts import PromptWriter
from prefixwatch.loadgen.report.page import markdown_summary
from prefixwatch.loadgen.report.reuse_section import reuse_table
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.request_log.records import RequestRecord, table_of
from prefixwatch.loadgen.reuse.grade import grade_reuse
from prefixwatch.loadgen.scenario.model import Scenario
from prefixwatch.loadgen.scenario.reuse_section import ReuseObjective

MakeRecord = Callable[..., RequestRecord]
SCENARIO = """\
name: parts
duration_seconds: 20
arrivals: {rate_per_second: 2}
groups: {count: 3, shared_tokens: 64, unique_tokens: 16, output_tokens: 4}
few_shot: {pool: 4, shots: 2, tokens: 20}
documents: {count: 5, per_turn: 2, tokens: 30}
dynamic_front: {tokens: 8}
sessions: {turns: 2, think_seconds: 1}
"""
CLASSES = ["system", "tools", "documents", "turns"]


def graded(records: Sequence[RequestRecord], objective: ReuseObjective | None = None) -> ReuseGrade:
    found = grade_reuse(Measured(Columns.of(records)), objective)
    assert found is not None
    return found


@pytest.mark.parametrize("sent_as", ["text", "field"])
def test_parts_are_the_whole_prompt_in_its_order(writer: PromptWriter, sent_as: str) -> None:
    scenario = parse(SCENARIO + f"tools: {{count: 2, tokens: 10, sent_as: {sent_as}}}\n", Scenario, name="t.yaml")
    requests = [request for request, _ in planned_prompts(scenario, writer, seed=1, nonce="a")]
    assert {request.turn for request in requests} == {0, 1}
    for request in requests:
        assert sum(part.tokens for part in request.parts) == request.prompt_tokens
        tokens = dict.fromkeys((part.block_class for part in request.parts), 0)
        for part in request.parts:
            tokens[part.block_class] += part.tokens
        turns = request.turn + 1
        want = {"changing": 8, "tools": 20, "system": 64, "examples": 40, "documents": 60 * turns}
        assert {name: tokens[name] for name in want} == want
        assert tokens["turns"] == 16 * turns + 4 * request.turn
    order = [part.block_class for part in requests[0].parts if part.block_class != "template"]
    if sent_as == "text":
        assert order == ["changing", "tools", "system", "examples", "documents", "turns"]


def test_a_hit_covers_the_head_of_the_prompt(make_record: MakeRecord) -> None:
    parts = {"planned_part_classes": CLASSES, "planned_part_tokens": [100, 50, 30, 20], "prompt_tokens": 200}
    other = {**parts, "planned_part_classes": ["tools", "system", "turns", "documents"], "group": "g1"}
    records = [
        make_record(index=0, cached_tokens=128, group="g0", **parts),
        make_record(index=1, cached_tokens=192, **other),
        make_record(index=2, cached_tokens=None, **parts),
    ]
    found = graded(records)
    assert {part.name: (part.requests, part.prompt_tokens, part.hit_tokens) for part in found.block_classes} == {
        "system": (2, 150, 150),
        "tools": (2, 150, 128),
        "documents": (2, 50, 12),
        "turns": (2, 50, 30),
    }
    assert {part.name: (part.prompt_tokens, part.hit_tokens) for part in found.prefixes} == {
        "g0": (100, 100),
        "g1": (50, 50),
    }


def test_a_log_without_parts_has_no_classes_and_keeps_its_sessions(make_record: MakeRecord) -> None:
    records = [make_record(index=k, turn=k, session="s", cached_tokens=50, prompt_tokens=100) for k in range(2)]
    found = graded(table_of(records).drop_columns(["planned_part_tokens", "planned_part_classes"]))
    assert found.block_classes == []
    assert found.sessions is not None
    assert found.sessions.sessions == 1


def test_sessions_are_told_apart_by_the_ratio_of_their_later_requests(make_record: MakeRecord) -> None:
    ratios = {"a": 95, "b": 80, "c": 79, "d": 0, "e": 100}
    records = [
        make_record(index=2 * k + turn, session=name, turn=turn, prompt_tokens=100, cached_tokens=turn * hits)
        for k, (name, hits) in enumerate(ratios.items())
        for turn in (0, 1)
    ]
    found = graded(records).sessions
    assert found is not None
    assert found.sessions == 5
    assert found.by_tenth == [1, 0, 0, 0, 0, 0, 0, 1, 1, 2]
    assert found.below_80_share == 0.4
    assert graded([record for record in records if record.turn == 0]).sessions is None


def test_one_session_name_in_two_repeats_is_two_sessions(make_record: MakeRecord) -> None:
    records = [
        make_record(index=1, repeat=k, session="s", turn=1, prompt_tokens=100, cached_tokens=90 * k) for k in (0, 1)
    ]
    found = graded(records).sessions
    assert found is not None
    assert (found.sessions, found.below_80_share) == (2, 0.5)


@pytest.mark.parametrize(
    ("at_least", "verdict"), [(0.2, "pass"), (0.45, "inconclusive"), (0.9, "fail"), (None, "not_graded")]
)
def test_the_weighted_figure_is_graded_by_its_whole_interval(
    make_record: MakeRecord, at_least: float | None, verdict: str
) -> None:
    """600 of 800 weighted tokens reused, P99 of 1 s at 0.3 a second: J = 0.45, and noise around it."""
    noise = np.random.default_rng(1).permutation([-64, 64] * 120).tolist()
    records = [
        make_record(
            index=k,
            scheduled_s=k,
            first_token_s=k + 1.0,
            end_s=k + 2.0,
            prompt_tokens=1000,
            planned_prompt_tokens=1000,
            planned_shared_tokens=1000,
            cached_tokens=600 + noise[k],
            planned_part_classes=["system", "turns"],
            planned_part_tokens=[800, 200],
        )
        for k in range(240)
    ]
    objective = ReuseObjective(weights={"system": 1.0}, tail_weight_per_second=0.3, at_least=at_least)
    facts = RunFacts(scenario="t", engine="simulated", workers=1, reuse_objective=objective)
    summary = build_summary(records, [], facts)
    (own,) = summary.policies.values()
    assert own.reuse is not None
    weighted = own.reuse.weighted
    assert weighted is not None
    assert weighted.value == pytest.approx(600 / 800 - 0.3)
    assert weighted.ci95 is not None
    assert weighted.ci95[0] < 0.45 < weighted.ci95[1]
    assert summary.verdict == verdict
    if at_least == 0.9:
        assert "weighted reuse missed: 0.45, at least 0.9" in verdict_sentence(summary)
    assert "weighted reuse +0.45 = 0.75 − 0.3 × 1 s P99" in markdown_summary(summary)
    table = reuse_table(summary)
    assert table is not None
    assert table.row_count == 7  # 2 block classes; copies; temporal, spatial, topological and their norm


def test_a_limit_that_nothing_can_be_compared_with_is_no_pass(make_record: MakeRecord) -> None:
    records = [make_record(index=k, planned_part_classes=["turns"], planned_part_tokens=[100]) for k in range(60)]
    objective = ReuseObjective(weights={"tools": 1.0}, at_least=0.9)
    facts = RunFacts(scenario="t", engine="simulated", workers=1, reuse_objective=objective)
    summary = build_summary(records, [], facts)
    assert summary.verdict == "inconclusive"
    assert any("reuse_objective.at_least has nothing to be compared with" in why for why in summary.validity.reasons)


def test_a_block_class_that_isn_t_one_is_refused() -> None:
    with pytest.raises(DocumentError, match=r"prompt: no block class: use system, tools"):
        parse(SCENARIO + "reuse_objective: {weights: {prompt: 1}}\n", Scenario, name="t.yaml")
    with pytest.raises(DocumentError, match="1000000"):
        parse(SCENARIO + "reuse_objective: {weights: {turns: 1.0e+308}}\n", Scenario, name="t.yaml")
    with pytest.raises(DocumentError, match="all weights are 0"):
        parse(SCENARIO + "reuse_objective: {weights: {turns: 0}}\n", Scenario, name="t.yaml")
