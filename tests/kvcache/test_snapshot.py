from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.kvcache.events.snapshot import PollInterval, SnapshotDiff, SnapshotWriter, next_interval_seconds
from prefixwatch.kvcache.index.block_index import BlockIndex

KEYS = st.sets(st.integers(0, 20))


def test_only_the_difference_to_the_last_report_is_written() -> None:
    index = BlockIndex()
    writer = SnapshotWriter("w", index)
    assert writer.report([1, 2, 3]) == SnapshotDiff({1, 2, 3}, set())
    diff = writer.report([2, 3, 4])
    assert diff == SnapshotDiff({4}, {1})
    assert diff.changed_keys == 2
    assert writer.report([4, 3, 2]).changed_keys == 0
    assert [index.holds("w", block) for block in (1, 2, 3, 4)] == [False, True, True, True]


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), KEYS), max_size=20))
def test_the_index_holds_every_workers_last_report(reports: list[tuple[str, set[int]]]) -> None:
    index, last = BlockIndex(), dict[str, set[int]]()
    writers = {name: SnapshotWriter(name, index) for name in ("a", "b")}
    for name, keys in reports:
        writers[name].report(keys)
        last[name] = keys
    for name, keys in last.items():
        assert {block for block in range(21) if index.holds(name, block)} == keys


@given(KEYS, KEYS, KEYS)
def test_naming_what_may_have_changed_is_as_good_as_a_whole_report(
    before: set[int], after: set[int], unchanged: set[int]
) -> None:
    whole, partial = (SnapshotWriter("w", BlockIndex()) for _ in range(2))
    whole.report(before)
    partial.report(before)
    touched = (before ^ after) | unchanged  # told too much, never too little
    assert partial.report_changed(touched & after, touched - after) == whole.report(after)
    assert partial.report(after).changed_keys == 0


def test_a_forgotten_workers_next_report_is_a_first_one() -> None:
    index = BlockIndex()
    writer = SnapshotWriter("w", index)
    writer.report([1])
    writer.forget()
    assert index.workers == ()
    assert writer.report([1]) == SnapshotDiff({1}, set())


@pytest.mark.parametrize(
    ("interval", "changed_keys", "expected"),
    [
        (0.1, 33, 0.1),
        (0.1, 27, 0.1),
        (0.1, 33.1, 0.07),
        (0.1, 26.9, 0.13),
        (0.06, 1000, 0.05),
        (2.9, 0, 3.0),
    ],
)
def test_more_changes_shorten_the_interval_and_fewer_lengthen_it(
    interval: float, changed_keys: float, expected: float
) -> None:
    assert next_interval_seconds(interval, changed_keys) == pytest.approx(expected)


def test_an_idle_engine_is_asked_every_three_seconds_in_the_end() -> None:
    interval = PollInterval()
    waits = [interval.polled(0) for _ in range(14)]
    assert waits[:2] == pytest.approx([0.13, 0.169])
    assert waits[-1] == 3.0


def test_the_interval_settles_where_thirty_keys_change_a_poll() -> None:
    """An engine that changes 100 keys a second: 30 keys take 0.3 s."""
    interval, waits = PollInterval(), list[float]()
    for _ in range(300):
        waits.append(interval.polled(round(100 * interval.seconds)))
    assert 0.15 < sum(waits[-60:]) / 60 < 0.6
