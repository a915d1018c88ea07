"""Runs are interleaved so that drift weighs on all policies alike."""

from prefixwatch.stack.bench.schedule import interleaved


def test_repeats_run_forwards_and_backwards_in_turn() -> None:
    assert [(run.policy, run.repeat) for run in interleaved(["a", "b"], 3)] == [
        ("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2),
    ]  # fmt: skip
