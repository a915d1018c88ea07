from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.router.policies.shared.hash_ring import HashRing, ring_position

FOUR = [f"http://w{k}:8000" for k in range(4)]
KEY = "590a1f69acd5cad2"


def test_positions_and_homes_equal_the_golden_vector() -> None:
    ring = HashRing(FOUR)
    assert ring_position(KEY) == 7190329008746209753
    assert len(ring) == 600
    assert ring.home(KEY, FOUR) == "http://w0:8000"
    assert ring.home(KEY, FOUR[1:]) == "http://w1:8000"


def test_nobody_acceptable_is_none() -> None:
    assert HashRing(FOUR).home(KEY, []) is None
    assert HashRing().home(KEY, FOUR) is None


def test_a_worker_that_joins_takes_about_its_share_and_nothing_moves_elsewhere() -> None:
    names = [f"w{k}" for k in range(9)]
    keys = [f"{k:016x}" for k in range(2000)]
    ring = HashRing(names[:8])
    before = {key: ring.home(key, names) for key in keys}
    ring.add(names)
    moved = Counter(ring.home(key, names) for key in keys if ring.home(key, names) != before[key])
    assert set(moved) == {"w8"}
    assert 0.07 < moved["w8"] / len(keys) < 0.16  # 1/9 ideally


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(FOUR), unique=True, min_size=1), st.text(max_size=20))
def test_the_order_of_joining_and_leaving_leaves_no_trace(names: list[str], key: str) -> None:
    grown = HashRing(reversed(FOUR))
    for name in set(FOUR) - set(names):
        grown.remove(name)
    assert grown.home(key, names) == HashRing(names).home(key, names)
    assert len(grown) == 150 * len(names)
