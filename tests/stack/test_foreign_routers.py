"""The diagnosis of a fleet behind routers that nobody here wrote: traces, engines' counters and KV events, no records.

Who held what, and why a router decided, is known to no one there. What there is confirms a cause or rules it out where
it suffices, and is named with the answer; otherwise the cause stays open. The field fleet's series, in small.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.field_faults import diagnosed
from benchmarks.field_series import Field
from prefixwatch.runbooks.diagnosis import Diagnosis, Observation
from prefixwatch.stack.diagnose.report import says

WORKERS = 24
OWN_ROUTERS = (
    "sticky_", "prefix_funnel_tokens", "predicted_hit_tokens", "delivered_hit_tokens", "prompt_token_checks",
    "router_", "in_flight_leak_requests", "isolation_audited", "isolation_findings", "isolation_violations",
    'data_quality{target="router', 'target_up{target="router', "request_records_total",
)  # fmt: skip
"""What only our router's records and page give."""
EVENTS = (
    "kv_blocks", "kv_cache_clears", "kv_event", "prefix_tree_blocks", "prefix_block_replicas", "isolation_lost",
    "isolation_cached", "isolation_duplicate",
)  # fmt: skip
BLOCKS_OF_A_WORKER = 9_600

pytestmark = [pytest.mark.prometheus, pytest.mark.timeout(300)]


def foreign(seed: int) -> Field:
    """Spans name session, worker and cached tokens; KV events of all engines are heard."""
    field = Field(WORKERS, seed)
    field.drop(*OWN_ROUTERS)
    field.counter('request_records_total{source="spans"}', 10_000)
    held(field, copies=0.3)
    return field


def held(field: Field, copies: float) -> None:
    """This share of the blocks that workers hold are held by another one, too."""
    field.gauge("prefix_tree_blocks", BLOCKS_OF_A_WORKER * len(field.workers) * (1 - copies))
    field.gauge('prefix_block_replicas{quantile="0.99"}', 3 if copies > 0.01 else 1)


def scattered(field: Field, reuse: float) -> None:
    """Nine of ten later turns go to another worker, and reuse this share of what moved ones did before: 0.8."""
    field.scale("session_moved_prompt_tokens_total", 9.0)
    field.scale("session_moved_hit_tokens_total", 9.0 * reuse)
    field.scale("session_hit_tokens_total", 0.1 + 0.8 * reuse)
    field.scale("session_migrations_total", 6.0)
    field.set("sessions_moved_ratio", 0.9)
    field.scale("prefix_hit_tokens_total", 0.4 + 0.6 * reuse)


def nothing_shared(field: Field) -> None:
    for family in ("prefix_hit_tokens", "tenant_hit_tokens", "session_hit_tokens", "session_moved_hit_tokens"):
        field.scale(family, 0.1)


def ask(field: Field, folder: Path) -> Diagnosis:
    [diagnosis] = asyncio.run(diagnosed(field, folder))
    return diagnosis


def state_of(cause: str, diagnosis: Diagnosis) -> str:
    lists = {"found": diagnosis.causes, "open": (*diagnosis.possible, *diagnosis.unchecked)}
    return next((name for name, causes in lists.items() if any(one.id == cause for one in causes)), "excluded")


def answer(step: str, diagnosis: Diagnosis) -> Observation:
    return next(one for one in diagnosis.observations if one.step.id == step)


def test_sessions_that_lose_their_reuse_by_moving_confirm_lost_affinity(tmp_path: Path) -> None:
    field = foreign(1)
    scattered(field, reuse=0.1)

    diagnosis = ask(field, tmp_path)

    assert [each.id for each in diagnosis.causes] == ["affinity_lost"]
    assert "by what later turns reuse after a move" in says(answer("collision-ratio", diagnosis))
    assert "by the engines' load" in says(answer("decision-branches", diagnosis))


def test_moves_that_cost_nothing_rule_it_out(tmp_path: Path) -> None:
    field = foreign(2)
    scattered(field, reuse=1.1)

    assert state_of("affinity_lost", ask(field, tmp_path)) == "excluded"


def test_without_sessions_blocks_at_one_worker_only_rule_it_out(tmp_path: Path) -> None:
    """Had a session moved while its old worker held its prefix, both would hold it."""
    field = foreign(3)
    field.drop("session")
    held(field, copies=0.0)

    diagnosis = ask(field, tmp_path)

    assert state_of("affinity_lost", diagnosis) == "excluded"
    assert "by KV events of all engines" in says(answer("collision-ratio", diagnosis))


@pytest.mark.parametrize(
    "without",
    [
        lambda field: field.drop("session_moved"),
        lambda field: field.drop("session"),
        lambda field: field.drop("workers_changed"),
        lambda field: field.scale("worker_load_requests", 2.0),
    ],
    ids=["whose session moved isn't known", "no sessions, and copies", "the pool isn't known", "the load rose"],
)
def test_lost_affinity_stays_open_where_evidence_is_missing(without: Callable[[Field], object], tmp_path: Path) -> None:
    field = foreign(4)
    scattered(field, reuse=0.1)
    without(field)

    assert state_of("affinity_lost", ask(field, tmp_path)) == "open"


def test_little_reuse_and_few_copies_confirm_that_prompts_share_too_little(tmp_path: Path) -> None:
    field = foreign(5)
    nothing_shared(field)
    held(field, copies=0.02)

    diagnosis = ask(field, tmp_path)

    assert [each.id for each in diagnosis.causes] == ["no_shared_prefix"]
    assert "by reuse and the blocks that several workers hold" in says(answer("held-ratio", diagnosis))


def test_many_copies_rule_it_out(tmp_path: Path) -> None:
    """The same prompts are computed at one worker after another: they share much, and go elsewhere."""
    field = foreign(6)
    nothing_shared(field)
    held(field, copies=0.7)

    assert state_of("no_shared_prefix", ask(field, tmp_path)) == "excluded"


@pytest.mark.parametrize(
    "without",
    [
        lambda field: field.drop(*EVENTS),
        lambda field: field.drop(f'kv_blocks_resident{{target="{field.workers[0][0]}"'),
        lambda field: field.drop("request_records_total"),
    ],
    ids=["no KV events", "one engine's events aren't heard", "no records at all"],
)
def test_shared_prefixes_stay_open_where_evidence_is_missing(
    without: Callable[[Field], object], tmp_path: Path
) -> None:
    field = foreign(7)
    nothing_shared(field)
    held(field, copies=0.02)
    without(field)

    assert state_of("no_shared_prefix", ask(field, tmp_path)) == "open"
