"""Hit ratio at other cache sizes, from request records."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixwatch.exporters.caches.cache_size import SIZES, WORKERS_OF_A_MODEL
from prefixwatch.kvcache.request_record import RequestRecord, mark_depths
from tests.exporters.requests import done, ledger_of

BLOCKS = 10
TOKENS = 16.0 * BLOCKS


def asked(document: int, worker: str = "w0", model: str = "m", **fields: object) -> RequestRecord:
    """A prompt of ten blocks that shares nothing with other documents."""
    names = [document * 1_000 + depth for depth in mark_depths(BLOCKS)]
    block = document * 1_000 + BLOCKS
    own = {"prompt_tokens": int(TOKENS), "marks": tuple(names), "prompt_block": block}
    return done(worker=worker, model=model, **(own | fields))


def rounds(count: int, documents: int = 3, worker: str = "w0") -> list[RequestRecord]:
    return [asked(document, worker) for _ in range(count) for document in range(documents)]


def ratios(
    records: list[RequestRecord], capacity: Callable[[str], float | None], now: float = 100.0
) -> dict[str, float]:
    found = ledger_of(records).cache_size_hit_ratios(now, capacity)
    return {size: ratio for (_, size), ratio in found.items()}


def test_of_documents_in_turn_a_cache_reuses_what_is_left_when_its_own_turn_comes() -> None:
    """The two others take 320 tokens: a cache of 384 still has the first 64 of the 160."""
    found = ratios(rounds(100), lambda _: 2 * TOKENS)

    assert list(found) == list(SIZES)
    assert (found["0.5"], found["1"]) == (0.0, 0.0)
    assert found["1.2"] == pytest.approx(64 / 160, abs=0.1), "within a step of 4.4 % of the size"
    assert found["2"] == found["4"] == pytest.approx(297 / 300)


@pytest.mark.parametrize(
    ("records", "capacity"),
    [
        (rounds(100), None),
        (rounds(6), 2 * TOKENS),  # 18 prompts prove nothing
        (rounds(10), 31 * TOKENS),  # the cache can't have been filled yet
        ([asked(1, prompt_tokens=None)] * 30, TOKENS),
        ([done(worker="w0")] * 30, TOKENS),  # no marks: another router's record
    ],
)
def test_it_is_unknown(records: list[RequestRecord], capacity: float | None) -> None:
    assert ratios(records, lambda _: capacity) == {}


def test_peers_stand_for_all_workers_of_their_model() -> None:
    most = WORKERS_OF_A_MODEL
    records = [each for k in range(most + 1) for each in rounds(20, documents=1 if k < most else 3, worker=f"w{k}")]

    found = ratios(records, lambda worker: 2 * TOKENS if worker != f"w{most - 1}" else None)

    assert found["1"] == pytest.approx(0.95), "one document fits; the worker beyond the first ones isn't followed"


def test_yesterdays_traffic_fades() -> None:
    ledger, now = ledger_of(), 0.0
    ledger._clock = lambda: now
    for record in rounds(100):
        ledger.record(record, "router")
    now = 24 * 3_600.0
    for _ in range(100):
        ledger.record(asked(7), "router")

    found = ledger.cache_size_hit_ratios(now, lambda _: 2 * TOKENS)

    assert found["m", "1"] == pytest.approx(0.99, abs=1e-6)


def test_workers_that_are_gone_make_room_for_those_that_follow_them() -> None:
    ledger, now = ledger_of(), 0.0
    ledger._clock = lambda: now
    for record in [one for k in range(WORKERS_OF_A_MODEL) for one in rounds(100, worker=f"old-{k}")]:
        ledger.record(record, "router")
    capacity = {"new-0": 2 * TOKENS}.get
    for now, known in ((500.0, False), (800.0, True)):
        for record in rounds(100, worker="new-0"):
            ledger.record(record, "router")
        assert bool(ledger.cache_size_hit_ratios(now, capacity)) is known, "in 500 s the others may come back"
