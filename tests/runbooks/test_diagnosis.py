"""Evidence in, causes out: the cases are field reports, told as the exporter's pages before and after."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.runbooks.diagnosis import Answer, Diagnosis, Observation, diagnose, observe
from prefixwatch.runbooks.evidence import ExporterEvidence, ask
from prefixwatch.runbooks.page import Step, shipped_runbooks
from prefixwatch.runbooks.promql import Sample
from tests.runbooks.fleet_pages import CASES, CHANGED, HISTORY, Pair, fleet, pages

RUNBOOKS = shipped_runbooks()
NOBODY = Answer((), "the query timed out", failed=True)


def one(value: float, **labels: str) -> Answer:
    return Answer((Sample(labels, value),))


def _answers(changes: Mapping[str, Pair | None], history: Mapping[str, float] | None) -> dict[str, Answer]:
    """By step, of the healthy fleet with these series changed or gone; without `history`, the exporter's alone."""
    evidence = ExporterEvidence("page", pages(fleet(changes)))

    async def asked() -> dict[str, Answer]:
        return {step.id: await ask(step, evidence, "5m") for step in RUNBOOKS.steps.values()}

    answers = asyncio.run(asked())
    if history is not None:
        answers |= {step: one(value, tenant="x", reason="load") for step, value in history.items()}
    return answers


def _read(answers: Mapping[str, Answer]) -> list[Observation]:
    return [
        observe(step, RUNBOOKS.group_of(step.id), answers[step.id])
        for step in RUNBOOKS.steps.values()
        if step.id in answers
    ]


def _diagnosed(
    changes: Mapping[str, Pair | None], alert: str | None = None, history: Mapping[str, float] | None = HISTORY
) -> Diagnosis:
    return diagnose(_read(_answers(changes, history)), RUNBOOKS, alert)


def _ids(diagnosis: Diagnosis) -> list[str]:
    return [each.id for each in diagnosis.causes]


@pytest.mark.parametrize("history", [HISTORY, None], ids=["Prometheus", "exporter alone"])
def test_a_healthy_fleet_has_nothing_wrong_because_every_cause_is_excluded(history: Mapping[str, float] | None) -> None:
    healthy = _diagnosed({}, history=history)

    assert (healthy.verdict, healthy.causes, healthy.possible, healthy.unchecked) == ("nothing wrong", (), (), ())


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_named_and_no_other(name: str) -> None:
    cause, changes = CASES[name]

    result = _diagnosed(changes, history={**HISTORY, **CHANGED.get(name, {})})

    assert _ids(result) == [cause]
    assert result.verdict == "cause found"


@cache
def _case(name: str) -> tuple[dict[str, Answer], list[str]]:
    _, changes = CASES[name]
    answers = _answers(changes, {**HISTORY, **CHANGED.get(name, {})})
    return answers, _ids(diagnose(_read(answers), RUNBOOKS))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_with_any_evidence_taken_away_a_fault_is_never_nothing_wrong_and_never_another_fault(
    data: st.DataObject,
) -> None:
    """Steps time out, one or all: what is named is what the whole evidence names, or it is open."""
    name = data.draw(st.sampled_from(sorted(CASES)))
    answers, named = _case(name)
    silent = data.draw(st.sets(st.sampled_from(sorted(answers))))

    left = diagnose(_read({**answers, **dict.fromkeys(silent, NOBODY)}), RUNBOOKS)

    assert left.verdict in ("cause found", "inconclusive")
    assert set(_ids(left)) <= set(named)
    assert set(named) <= set(_ids(left)) | {each.id for each in (*left.possible, *left.unchecked)}


@settings(max_examples=60, deadline=None)
@given(families=st.sets(st.sampled_from(sorted({name.partition("{")[0] for name in fleet({})}))))
def test_with_any_families_of_a_healthy_fleet_gone_nobody_is_accused(families: Collection[str]) -> None:
    """A scrape job that drops metrics, an engine that doesn't report them: unknown, and only that is found."""
    result = _diagnosed({name: None for name in fleet({}) if name.partition("{")[0] in families}, history=None)

    unknown = {o.step.id for o in result.observations if o.state == "unknown"}
    unseen = {name for name, cause in RUNBOOKS.causes.items() if set(cause.steps) <= unknown}
    assert set(_ids(result)) <= {"exporter_unseen"}
    assert unseen <= {each.id for each in result.unchecked}
    assert result.verdict != "nothing wrong" or not unseen


def test_where_steps_have_no_answer_it_is_inconclusive_and_says_what_was_not_looked_for() -> None:
    """pyrra-dev/pyrra#1925 (SL03): a ratio over a handful of events is no evidence, for or against."""
    quiet = {"sticky_requests_total": (0.0, 4.0), "sticky_collisions_total": (0.0, 4.0)}

    result = _diagnosed(quiet)

    assert result.verdict == "inconclusive"
    assert {each.id for each in result.unchecked} == {"affinity_lost"}, "the other needs a hit ratio that is low"
    assert [step.id for step in result.unchecked[0].missing] == ["collision-ratio"]


def test_an_empty_source_is_its_own_fault_and_a_silent_one_is_unknown() -> None:
    empty = diagnose(_read({step: Answer() for step in RUNBOOKS.steps}), RUNBOOKS)
    silent = diagnose(_read(dict.fromkeys(RUNBOOKS.steps, NOBODY)), RUNBOOKS)

    assert _ids(empty) == ["exporter_unseen"]
    assert not [o for o in empty.observations if o.state == "ok"], "what nobody measures is not fine"
    assert (silent.verdict, _ids(silent)) == ("inconclusive", [])
    assert len(silent.unchecked) == len(RUNBOOKS.causes)


def test_a_bad_reading_that_no_cause_explains_is_inconclusive() -> None:
    result = _diagnosed({'prefix_hit_tokens_total{target="a",model="m",tier="gpu"}': (0, 50_000)})

    assert result.verdict == "inconclusive"
    assert [each.step.id for each in result.unexplained] == ["fleet-hit-ratio"]


def test_a_gap_in_predictions_is_not_blamed_on_the_tokenizer_while_token_counts_are_unknown() -> None:
    changes: dict[str, Pair | None] = {
        "delivered_hit_tokens_total": (0, 5_000),
        'prompt_token_checks_total{result="equal"}': None,
        'prompt_token_checks_total{result="different"}': None,
    }

    result = _diagnosed(changes)

    assert (result.verdict, _ids(result)) == ("inconclusive", [])
    assert {"tokenizer_mismatch", "belief_outlives_cache"} <= {each.id for each in result.possible}


def test_one_large_tenant_is_no_flood_while_it_does_not_grow_or_harms_nobody() -> None:
    """A fresh stack with tenants of 2 to 1: the share alone accuses nobody."""
    large: dict[str, Pair | None] = {'tenant_prompt_tokens_total{tenant="x"}': (0, 300_000)}
    evicting: dict[str, Pair | None] = {'kv_blocks_regretted_total{target="a"}': (0, 100)}

    assert _diagnosed(large).verdict == "nothing wrong"
    assert _diagnosed(large, history={**HISTORY, "tenant-growth": 4.0}).verdict == "nothing wrong"
    assert _ids(_diagnosed(large | evicting, history={**HISTORY, "tenant-growth": 4.0})) == ["tenant_flood"]


def _fleet_of(step: str, bad: float, good: float, workers: int, concerned: int) -> Answer:
    values = [bad if number < concerned else good for number in range(workers)]
    return Answer(tuple(Sample({"target": f"w{number}"}, value) for number, value in enumerate(values)))


def test_one_bad_worker_of_200_is_named_as_one_and_does_not_explain_the_fleet() -> None:
    answers = _answers({'prefix_hit_tokens_total{target="a",model="m",tier="gpu"}': (0, 50_000)}, HISTORY)
    answers["targets-down"] = _fleet_of("targets-down", 1.0, 0.0, 200, 1)

    result = diagnose(_read(answers), RUNBOOKS)

    assert result.found is not None
    assert (result.found.id, result.found.share) == ("target_unreachable", 0.005)
    assert [each.step.id for each in result.unexplained] == ["fleet-hit-ratio"]


@pytest.mark.parametrize(("concerned", "found"), [(19, []), (20, ["cache_too_small"])])
def test_a_cache_is_too_small_for_the_fleet_when_a_tenth_of_the_workers_say_so(
    concerned: int, found: list[str]
) -> None:
    answers = _answers({}, HISTORY)
    answers["regret-ratio"] = _fleet_of("regret-ratio", 0.4, 0.01, 200, concerned)

    assert _ids(diagnose(_read(answers), RUNBOOKS)) == found


def test_a_cause_of_the_fleet_comes_before_one_of_a_single_worker() -> None:
    answers = _answers({'kv_blocks_regretted_total{target="a"}': (0, 400)}, HISTORY)
    answers["targets-down"] = _fleet_of("targets-down", 1.0, 0.0, 200, 1)
    answers["slowest-over-fastest"] = _fleet_of("slowest-over-fastest", 5.0, 1.0, 200, 1)

    assert _ids(diagnose(_read(answers), RUNBOOKS)) == ["cache_too_small", "slow_worker", "target_unreachable"]


def test_equals_are_a_tie_and_the_alert_that_is_asked_about_breaks_it() -> None:
    changes: dict[str, Pair | None] = {
        'isolation_violations_total{kind="cross_tenant_hit"}': (0, 3),
        'kv_event_batches_missed_total{target="a"}': (0, 7),
    }
    answers = _answers(changes, HISTORY)
    answers["oldest-in-flight"] = one(2000.0)

    tie = diagnose(_read(answers), RUNBOOKS)
    asked = diagnose(_read(answers), RUNBOOKS, "RequestsStuck")

    assert tie.tied
    assert {each.score for each in tie.causes[:2]} == {6}
    assert (asked.tied, asked.causes[0].id) == (False, "requests_stuck")


def test_affinity_given_up_under_load_needs_branch_share_collisions_and_hit_ratio() -> None:
    """sgl-project/sglang#32195 (RT06)."""
    answers = {
        "decision-branches": one(0.35, reason="imbalanced"),
        "collision-ratio": one(0.12),
        "fleet-hit-ratio": one(0.45),
    }

    assert _ids(diagnose(_read(answers), RUNBOOKS)) == ["affinity_abandoned"]
    assert _ids(diagnose(_read({**answers, "fleet-hit-ratio": one(0.7)}), RUNBOOKS)) == []


def test_without_history_scattered_sessions_are_possible_and_not_named() -> None:
    changes: dict[str, Pair | None] = {"sticky_collisions_total": (0, 400)}

    alone, with_history = _diagnosed(changes, history=None), _diagnosed(changes)

    assert (alone.verdict, alone.possible[0].id) == ("inconclusive", "affinity_lost")
    assert [step.id for step in alone.possible[0].missing] == ["decision-branches"]
    assert _ids(with_history) == ["affinity_lost"]


def test_the_worst_tenth_is_the_value_that_a_tenth_of_the_series_reach() -> None:
    step: Step = RUNBOOKS.steps["regret-ratio"]
    samples = [Sample({"target": str(number)}, float(number)) for number in range(40)]

    assert [step.picked(samples[:count]).value for count in (1, 10, 11, 40)] == [0.0, 9.0, 9.0, 36.0]


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        (
            "prefix_changed",  # an assistant's customers left: its prefix has no requests, and nothing else is wrong
            {'named_prefix_request_share_ratio{prefix="support-bot",span="now"}': (0.0, 0.0)},
        ),
        (
            "keys_reshuffled",  # a worker died: that is the cause, and sessions had to move
            {
                'workers_changed{change="left"}': (0, 1),
                "sessions_moved_ratio": (0.02, 0.3),
                'target_up{target="a",system="vllm",version="0.32"}': (0, 0),
                'scrape_failures_total{target="a",reason="refused"}': (10, 40),
            },
        ),
        ("keys_reshuffled", {"sessions_moved_ratio": (0.02, 0.3)}),  # the same workers: the router scatters
        ("keys_reshuffled", {'workers_changed{change="joined"}': (0, 3)}),  # nobody moved
        (
            "one_tenant",  # all tenants alike
            {
                'tenant_hit_tokens_total{tenant="x"}': (0, 5_000),
                'tenant_hit_tokens_total{tenant="y"}': (0, 5_000),
                'prefix_hit_tokens_total{target="a",model="m",tier="gpu"}': (0, 10_000),
            },
        ),
        ("one_tenant", {'tenant_hit_tokens_total{tenant="x"}': (0, 5_000)}),  # the fleet reuses enough
    ],
)
def test_a_rival_of_what_changed_is_not_named(cause: str, changes: Mapping[str, Pair | None]) -> None:
    result = _diagnosed(changes)
    named = {each.id for each in (*result.causes, *result.possible, *result.unchecked)}
    assert cause not in named, "excluded, not only unlikely"
