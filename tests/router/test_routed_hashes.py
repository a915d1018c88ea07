from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.router.policies.shared.routed_hashes import RoutedHashes

WORKERS = ["a", "b", "c"]
steps = st.one_of(
    st.tuples(st.just("store"), st.sampled_from(WORKERS), st.lists(st.integers(0, 9), max_size=6)),
    st.tuples(st.just("trim"), st.sampled_from(WORKERS), st.integers(0, 6)),
    st.tuples(st.just("forget"), st.sampled_from(WORKERS), st.none()),
)


@given(st.lists(steps, max_size=30))
def test_it_agrees_with_plain_lists(script: list[tuple[str, str, list[int] | int | None]]) -> None:
    sent, by_worker = RoutedHashes(), {worker: list[int]() for worker in WORKERS}
    got: dict[int, list[str]] = {value: [] for value in range(10)}
    for step, worker, argument in script:
        if isinstance(argument, list):
            sent.store(worker, argument)
            for value in argument:
                by_worker[worker] = [other for other in by_worker[worker] if other != value] + [value]
                if worker not in got[value]:
                    got[value].append(worker)
        elif step == "trim":
            assert isinstance(argument, int)
            sent.trim(worker, argument)
            by_worker[worker] = by_worker[worker][max(0, len(by_worker[worker]) - argument) :]
        else:
            sent.forget(worker)
            by_worker[worker] = []
        got = {value: [holder for holder in got[value] if value in by_worker[holder]] for value in got}
    for value in range(10):
        assert list(sent.holders(value)) == got[value]
        assert (value in sent) is bool(got[value])
    assert len(sent) == len({value for values in by_worker.values() for value in values})
    assert {worker: sent.count(worker) for worker in WORKERS} == {w: len(values) for w, values in by_worker.items()}


def test_the_hash_stored_longest_ago_is_trimmed_first() -> None:
    sent = RoutedHashes()
    sent.store("a", [1, 2, 3])
    sent.store("a", [1])
    sent.trim_all(2)
    assert [value in sent for value in (1, 2, 3)] == [True, False, True]
