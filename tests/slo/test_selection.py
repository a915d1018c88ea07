"""Which requests an objective is about."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.documents import DocumentError
from prefixwatch.slo.buckets import BOUNDS, le_matcher, nearest
from prefixwatch.slo.build import load_objectives
from prefixwatch.slo.objective import Objective, RequestField
from prefixwatch.slo.read import SHIPPED
from prefixwatch.slo.selection import RequestFacts, parse_length

TTFT = (SHIPPED / "ttft.yaml").read_text(encoding="utf-8")
FIELD = "prefixwatch.dev/request-field: ttft_seconds"


def objective(folder: Path, **annotations: str) -> Objective:
    lines = "".join(f'\n    prefixwatch.dev/{key.replace("_", "-")}: "{value}"' for key, value in annotations.items())
    path = folder / "own.yaml"
    path.write_text(TTFT.replace(FIELD, FIELD + lines))
    [made] = load_objectives([path])
    return made


def test_prompt_lengths_are_above_the_first_bound_and_up_to_the_second(tmp_path: Path) -> None:
    made = objective(tmp_path, prompt_length="512-2048")

    assert [made.selects(RequestFacts(prompt_tokens=n)) for n in (512, 513, 2048, 2049)] == [False, True, True, False]
    assert made.rule == "95 % of requests of prompts of 512-2048 tokens: TTFT ≤ 0.5 s"


def test_a_request_whose_fact_is_unknown_is_left_out(tmp_path: Path) -> None:
    assert not objective(tmp_path, prompt_length="32768+").selects(RequestFacts())
    assert not objective(tmp_path, cache="miss").selects(RequestFacts())
    assert not objective(tmp_path, session_turn="later").selects(RequestFacts())


def test_all_conditions_must_hold(tmp_path: Path) -> None:
    made = objective(tmp_path, tenant="gold-*", cache="hit, partial", session_turn="later")
    wanted = RequestFacts(tenant="gold-1", cache="hit", turn="later")

    assert made.selects(wanted)
    assert not made.selects(RequestFacts(tenant="free-1", cache="hit", turn="later"))
    assert not made.selects(RequestFacts(tenant="gold-1", cache="miss", turn="later"))
    assert not made.selects(RequestFacts(tenant="gold-1", cache="hit", turn="first"))
    assert made.rule.startswith("95 % of requests of tenants gold-*, cache class hit or partial, later turns: ")


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        ("prompt_length", "2048-512", "'2048-512' is not a range of tokens: write 512-2048, or 32768"),
        ("prompt_length", "long", "'long' is not a range of tokens"),
        ("cache", "warm", "'warm' is not a cache class: use hit, partial, miss"),
        ("session_turn", "second", "'second' is not a turn: use first or later"),
    ],
)
def test_selections_that_mean_nothing_are_refused(tmp_path: Path, annotation: str, value: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        objective(tmp_path, **{annotation: value})


def test_one_request_is_judged_as_many_are(tmp_path: Path) -> None:
    made = objective(tmp_path)
    done, ttft = RequestField.COMPLETED, RequestField.TTFT_SECONDS

    assert made.verdict({done: 1.0, ttft: 0.5}) is True
    assert made.verdict({done: 1.0, ttft: 0.51}) is False
    assert made.verdict({done: 1.0, ttft: None}) is None
    assert made.verdict({done: 0.0, ttft: None}) is False


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_every_length_lies_in_one_of_two_neighbouring_ranges(low: int, size: int) -> None:
    first, second = parse_length(f"{low}-{low + size}"), parse_length(f"{low + size}+")

    assert first[1] == second[0] == low + size


@given(st.floats(1e-6, 1e6))
def test_the_nearest_bounds_are_neighbours(value: float) -> None:
    bounds = BOUNDS["prefixwatch_ttft_seconds"]

    near = nearest(bounds, value)

    assert 1 <= len(near) <= 2
    assert len(near) == 1 or near[0] < value <= near[1]


@pytest.mark.parametrize(
    ("bound", "matcher"), [(1.0, 'le=~"1([.]0)?"'), (0.012, 'le="0.012"'), (1e-05, 'le=~"0[.]00001|1e-05"')]
)
def test_a_bound_is_matched_as_every_version_writes_it(bound: float, matcher: str) -> None:
    """prometheus/prometheus#14485 (SL06)."""
    assert le_matcher(bound) == matcher


def test_the_cached_share_of_a_prompt_can_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        TTFT.replace("ttft_seconds", "hit_ratio").replace("op: lte", "op: gte").replace("value: 0.5", "value: 0.8")
    )

    [made] = load_objectives([path])

    assert made.rule == "95 % of requests: hit tokens ≥ 80% of the prompt"
    assert made.verdict({RequestField.COMPLETED: 1.0, RequestField.HIT_RATIO: 0.75}) is False
    assert made.verdict({RequestField.COMPLETED: 1.0}) is None
