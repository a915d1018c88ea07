"""Prefill and decode apart: who is asked what, when prefill stays local, what moving KV costs."""

from __future__ import annotations

from typing import Any

import pytest

from prefixwatch.router.policies import make_policy
from prefixwatch.router.policy import Decision, Fleet, LoadReport, Needs, NoWorkers, Policy, RouteRequest
from prefixwatch.simulator.disaggregation.policies import Disaggregated, DisaggregationOptions
from tests.router.fleets import a_fleet, a_request


class Recorder(Policy):
    """Takes the first worker and writes down what it is told."""

    name = "recorder"
    source = "test"
    needs = Needs()
    reasons = ("first",)

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, str]] = []

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        self.told.append(("choose", fleet.workers[0].name))
        return Decision(fleet.workers[0].name, "first")

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self.told.append(("admit", worker))

    def on_first_token(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self.told.append(("first_token", worker))

    def on_end(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self.told.append(("end", worker))


def prefill_fleet(in_flight: list[int], **fields: Any) -> Fleet:
    fleet = a_fleet(in_flight, **fields)
    for worker in fleet.workers:
        worker.name = f"p{worker.name}"
    return fleet


def by_kv(*usage: float) -> list[LoadReport]:
    return [LoadReport(0.0, kv_usage_ratio=ratio, kv_capacity_tokens=1_000_000) for ratio in usage]


def test_each_side_goes_by_its_own_signals() -> None:
    """Prefill to the idle worker whatever decodes where; decode to the emptiest KV whatever is queued for prefill."""
    for prefill_load, decode_kv in (([0, 5], (0.9, 0.1)), ([5, 0], (0.9, 0.1)), ([0, 5], (0.1, 0.9))):
        both = Disaggregated(make_policy("least_load"), make_policy("flexlb_decode"))
        split = both.choose(
            a_request(), prefill_fleet(prefill_load), a_fleet(prefill_load[::-1], report=by_kv(*decode_kv))
        )
        assert split.prefill is not None
        assert split.prefill.worker == f"pw{prefill_load.index(0)}"
        assert split.decode.worker == f"w{decode_kv.index(0.1)}"


def test_load_of_the_other_side_changes_nothing() -> None:
    def chosen(prefill_load: list[int], decode_load: list[int]) -> tuple[str, str]:
        both = Disaggregated(make_policy("least_load"), make_policy("least_load"))
        split = both.choose(a_request(), prefill_fleet(prefill_load), a_fleet(decode_load))
        assert split.prefill is not None
        return split.prefill.worker, split.decode.worker

    assert {chosen([3, 1, 2], load)[0] for load in ([0, 9, 9], [9, 0, 9], [9, 9, 0])} == {"pw1"}
    assert {chosen(load, [3, 1, 2])[1] for load in ([0, 9, 9], [9, 0, 9], [9, 9, 0])} == {"w1"}


def test_each_policy_hears_only_of_its_own_worker() -> None:
    prefill, decode = Recorder(), Recorder()
    both, request = Disaggregated(prefill, decode), a_request()
    split = both.choose(request, prefill_fleet([0]), a_fleet([0]))
    for happened in (both.on_admit, both.on_prefilled, both.on_first_token, both.on_end):
        happened(request, split, 0.0)
    assert prefill.told == [("choose", "pw0"), ("admit", "pw0"), ("first_token", "pw0"), ("end", "pw0")]
    assert decode.told == [("choose", "w0"), ("admit", "w0"), ("first_token", "w0"), ("end", "w0")]


def test_a_failed_prefill_ends_without_a_first_token() -> None:
    prefill = Recorder()
    both, request = Disaggregated(prefill, Recorder()), a_request()
    split = both.choose(request, prefill_fleet([0]), a_fleet([0]))
    both.on_prefill_failed(request, split, 0.0)
    assert prefill.told == [("choose", "pw0"), ("end", "pw0")]


@pytest.mark.parametrize(
    ("prompt_tokens", "cached_tokens", "local"),
    [
        (1000, 301, True),  # 699 uncached: below 0.7
        (1000, 300, False),
        (1000, 0, False),  # short, but nothing is cached
        (10_000, 7953, True),  # 2,047 uncached
        (10_000, 7952, False),
        (1000, 1000, True),
        (0, 0, False),
    ],
)
def test_dynamos_condition_for_a_local_prefill(prompt_tokens: int, cached_tokens: int, local: bool) -> None:
    assert DisaggregationOptions(conditional=True).stays_local(prompt_tokens, cached_tokens) is local
    assert not DisaggregationOptions().stays_local(prompt_tokens, cached_tokens)


def test_a_local_prefill_asks_no_prefill_worker() -> None:
    prefill, decode = Recorder(), Recorder()
    both = Disaggregated(prefill, decode, DisaggregationOptions(conditional=True))
    request = a_request(prompt_tokens=160)
    split = both.choose(request, prefill_fleet([0]), a_fleet([0], {"w0": 4}))
    assert (split.prefill, split.decode.worker, split.decode_hit_blocks) == (None, "w0", 4)
    for happened in (both.on_admit, both.on_prefilled, both.on_first_token, both.on_end):
        happened(request, split, 0.0)
    assert prefill.told == []
    assert [what for what, _ in decode.told] == ["choose", "admit", "first_token", "end"]


def test_what_counts_is_held_by_the_chosen_decode_worker() -> None:
    both = Disaggregated(Recorder(), Recorder(), DisaggregationOptions(conditional=True))
    split = both.choose(a_request(), prefill_fleet([0]), a_fleet([0, 0], {"w1": 10}))
    assert split.prefill is not None


def test_a_side_without_a_worker_refuses() -> None:
    both = Disaggregated(Recorder(), make_policy("flexlb_decode"))
    full = [LoadReport(0.0, kv_usage_ratio=1.0, kv_capacity_tokens=1000)]
    with pytest.raises(NoWorkers):
        both.choose(a_request(), prefill_fleet([0]), a_fleet([0], report=full))


@pytest.mark.parametrize(
    ("tokens", "published_ms"), [(2048, 35), (8192, 57), (16_384, 86), (32_768, 165), (49_152, 235)]
)
def test_transfers_take_what_llmd_published(tokens: int, published_ms: float) -> None:
    """llm-d's pull of KV from a peer; the line through the ends is within 10 ms of each figure."""
    assert 1000 * DisaggregationOptions().transfer_seconds(tokens) == pytest.approx(published_ms, abs=10)


def test_nothing_to_move_takes_no_time() -> None:
    assert DisaggregationOptions().transfer_seconds(0) == 0.0
