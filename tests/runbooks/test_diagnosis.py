"""Evidence in, ranked causes out: the cases are field reports, told as the exporter's pages before and after."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from runbooks.diagnosis import Answer, Diagnosis, diagnose, observe
from runbooks.evidence import ExporterEvidence, ask
from runbooks.page import shipped_runbooks
from tests.runbooks.fleet_pages import CASES, Pair, fleet, pages

RUNBOOKS = shipped_runbooks()


def _diagnosed(changes: Mapping[str, Pair | None], alert: str | None = None) -> Diagnosis:
    """The healthy fleet with these series changed, or taken away."""
    evidence = ExporterEvidence("page", pages(fleet(changes)))

    async def observed() -> Diagnosis:
        observations = [
            observe(step, RUNBOOKS.group_of(step.id), await ask(step, evidence, "5m"))
            for step in RUNBOOKS.steps.values()
        ]
        return diagnose(observations, RUNBOOKS, alert)

    return asyncio.run(observed())


def test_a_healthy_fleet_has_nothing_wrong() -> None:
    healthy = _diagnosed({})
    assert (healthy.verdict, healthy.found) == ("nothing wrong", None)


@pytest.mark.parametrize(("cause", "changes"), CASES.values(), ids=list(CASES))
def test_the_cause_comes_out_on_top(cause: str, changes: dict[str, Pair | None]) -> None:
    result = _diagnosed(changes)
    assert result.found is not None
    assert result.found.id == cause
    assert result.found.evidence_for


def test_too_little_traffic_judges_nothing() -> None:
    """pyrra-dev/pyrra#1925 (SL03): a ratio over a handful of events is no evidence."""
    quiet = {
        'prefix_hit_tokens_total{target="a",model="m",tier="gpu"}': (0, 0),
        'prefix_query_tokens_total{target="a",model="m"}': (0, 900),
        "sticky_requests_total": (0, 4),
        "sticky_collisions_total": (0, 4),
        'requests_total{class="chat",outcome="completed"}': (0, 4),
        'requests_total{class="chat",outcome="refused"}': (0, 1),
    }
    assert _diagnosed(quiet).verdict == "nothing wrong"


def test_where_nothing_is_measured_the_measuring_is_at_fault() -> None:
    empty = [observe(step, "cache", Answer(None, {}, 0, "no series")) for step in RUNBOOKS.steps.values()]
    found = diagnose(empty, RUNBOOKS).found
    assert found is not None
    assert found.id == "exporter_unseen"
    assert not [o for o in diagnose(empty, RUNBOOKS).observations if o.state == "ok"], (
        "what nobody measures is not fine"
    )


def test_a_bad_reading_without_a_cause_is_inconclusive() -> None:
    result = _diagnosed({"sticky_collisions_total": (0, 80), "hotspot_max_over_mean": (1.6, 1.6)})
    assert result.verdict == "inconclusive"


def test_among_equals_the_causes_that_the_alert_asks_about_come_first() -> None:
    changes: dict[str, Pair | None] = {
        'in_flight_leak_requests{worker="a"}': (40, 40),
        'kv_event_batches_missed_total{target="a"}': (0, 7),
    }
    leak, gap = _diagnosed(changes, "InFlightLeak"), _diagnosed(changes, "IndexStale")
    assert [r.score for r in leak.causes[:2]] == [r.score for r in gap.causes[:2]]
    assert (leak.causes[0].id, gap.causes[0].id) == ("in_flight_leak", "event_gap")


def test_evidence_against_is_kept_beside_evidence_for() -> None:
    result = _diagnosed({'kv_cache_clears_total{target="a"}': (0, 1)})
    (restarted,) = [ranked for ranked in result.causes if ranked.id == "engine_restarted"]
    assert [o.step.id for o in restarted.evidence_for] == ["cache-cleared"]
    assert "targets-flapped" in [o.step.id for o in restarted.evidence_against]


def test_affinity_given_up_under_load_is_named_when_branch_share_and_hit_ratio_move_together() -> None:
    """sgl-project/sglang#32195 (RT06)."""
    answers = {
        "decision-branches": Answer(0.35, {"reason": "imbalanced"}),
        "collision-ratio": Answer(0.12, {}),
        "fleet-hit-ratio": Answer(0.45, {}),
    }
    observed = [observe(RUNBOOKS.steps[name], "affinity", answer) for name, answer in answers.items()]
    found = diagnose(observed, RUNBOOKS).found
    assert found is not None
    assert found.id == "affinity_abandoned"
