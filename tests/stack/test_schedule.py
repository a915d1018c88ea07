"""Runs are interleaved so that drift weighs on all policies alike."""

from prefixwatch.stack.bench.schedule import interleaved, session_suffix


def test_repeats_run_forwards_and_backwards_in_turn() -> None:
    assert [(run.policy, run.repeat) for run in interleaved(["a", "b"], 3)] == [
        ("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2),
    ]  # fmt: skip


def test_only_runs_that_one_exporter_watches_or_that_share_a_target_have_sessions_of_their_own() -> None:
    runs = interleaved(["a", "b"], 2)
    assert {session_suffix(run, own_engines=True, live=False) for run in runs} == {""}
    assert len({session_suffix(run, own_engines=True, live=True) for run in runs}) == len(runs)
    assert {session_suffix(run, own_engines=False, live=False) for run in runs} == {None}
