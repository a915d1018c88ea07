"""The engines' own counters over one run, on the load generator's clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefixwatch.loadgen.grading.run_figures import figures_of_runs, run_notes
from prefixwatch.loadgen.request_log.engine_counters import disagreement, engine_counters
from prefixwatch.loadgen.request_log.fleet_rows import FleetRow, put_on_clock, read_fleet, write_fleet
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord, table_of


def row(at: float, hits: float | None, queries: float | None, *, worker: str = "w0", **more: int) -> FleetRow:
    return FleetRow(
        unix_s=1000.0 + at, policy="p", repeat=0, worker=worker, up=True, running=0.0, waiting=0.0, kv_usage_ratio=0.1,
        prefix_hit_tokens_total=hits, prefix_query_tokens_total=queries, **more,
    )  # fmt: skip


def log(cached: list[int | None], prompt: int = 1000) -> pa.Table:
    return table_of(
        RequestRecord(
            id=f"r{k}", policy="p", repeat=0, index=k, phase="measured", tenant="-", session="s", turn=0, group="g",
            request_class="c", scheduled_s=0.0, sent_s=0.0, end_s=1.0, outcome=Outcome.COMPLETED, prompt_tokens=prompt,
            cached_tokens=tokens,
        )
        for k, tokens in enumerate(cached)
    )  # fmt: skip


BEFORE, AFTER = row(-1, 9e5, 1e6), row(60, 9.1e5, 1.1e6)


def test_the_runs_ratio_is_not_the_engines_lifetime_ratio() -> None:
    """vllm-project/vllm#46938 (EM46): 0.10 for this run; 0.827 since the engine started."""
    found = engine_counters([BEFORE, AFTER])

    assert found is not None
    assert found.hit_ratio == pytest.approx(0.10)
    assert (found.start_hit_tokens, found.start_query_tokens) == (9e5, 1e6)
    assert (found.end_hit_tokens, found.end_query_tokens) == (9.1e5, 1.1e6)


def test_workers_are_summed_before_the_ratio() -> None:
    found = engine_counters([BEFORE, row(-1, 0.0, 0.0, worker="w1"), AFTER, row(60, 9e4, 1e5, worker="w1")])

    assert found is not None
    assert (found.hit_tokens, found.query_tokens) == (1e5, 2e5)


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        ([row(30, 1e3, 2e3, counter_resets=1), replace(AFTER, counter_resets=1)], "w0's counters were reset"),
        ([row(30, 1e3, 2e3), AFTER], "w0's counters were reset"),
        ([replace(AFTER, up=False)], "w0 gave no metrics at the run's start or end"),
        ([row(60, None, None)], "w0 has no counters of prefix hits"),
    ],
)
def test_a_reset_in_between_leaves_no_ratio_but_a_reason(between: list[FleetRow], reason: str) -> None:
    """vllm-project/vllm#46938 (EM46)."""
    found = engine_counters([BEFORE, *between])

    assert found is not None
    assert found.reason.startswith(reason)
    assert (found.hit_tokens, found.query_tokens, found.hit_ratio) == (None, None, None)


def test_engines_that_nobody_read_have_no_counters() -> None:
    assert engine_counters([]) is None


def test_counters_and_answers_that_agree_need_no_note() -> None:
    found = engine_counters([row(0, 0.0, 0.0), row(9, 1000.0, 5000.0)])
    assert found is not None
    assert disagreement(found, log([0, 500, 500, 0, 0])) is None


def test_counters_that_say_more_than_the_answers_become_a_note() -> None:
    found = engine_counters([row(0, 0.0, 0.0), row(9, 3000.0, 8000.0)])
    assert found is not None

    note = disagreement(found, log([0, 500, 500, 0, 0]))

    assert note is not None
    assert note.startswith(
        "the engines counted 3,000 hit tokens of 8,000 queried, the answers report 1,000 of 5,000: others use"
    )


def test_an_answer_without_usage_forbids_the_comparison() -> None:
    found = engine_counters([row(0, 0.0, 0.0), row(9, 3000.0, 8000.0)])
    assert found is not None
    assert disagreement(found, log([0, None])) is None


def test_each_policy_has_one_note_and_says_of_how_many_runs() -> None:
    rows = [replace(each, repeat=k) for k in range(2) for each in (row(0, 0.0, 0.0), row(9, 3000.0, 8000.0))]
    runs = figures_of_runs([{"policy": "p", "repeat": k} for k in range(2)], rows)

    notes = run_notes(runs, log([0, 500]))

    assert [note[:35] for note in notes] == ["p, 1 of 2 runs: the engines counted"]  # repeat 1 isn't in the log


def test_a_closed_loop_is_said_to_be_one() -> None:
    runs = figures_of_runs([{"policy": "p", "repeat": 0, "loop": "closed", "concurrency": 8}], [])
    assert run_notes(runs, log([0]))[0].startswith(
        "closed loop of 8 users: a server that stalls is sent fewer requests meanwhile"
    )


def test_rows_are_put_on_the_request_logs_clock(tmp_path: Path) -> None:
    rows = [row(0.5, 1.0, 2.0, kv_blocks_stored_total=7)]

    put_on_clock(rows, 1000.0)
    write_fleet(tmp_path / "fleet.parquet", rows)

    assert rows[0].at_s == 0.5
    assert read_fleet(tmp_path / "fleet.parquet") == rows


def test_an_older_log_is_read_with_what_it_has(tmp_path: Path) -> None:
    old = ["unix_s", "policy", "repeat", "worker", "up", "running", "waiting", "kv_usage_ratio",
           "prefix_hit_tokens_total", "prefix_query_tokens_total"]  # fmt: skip
    pq.write_table(pa.Table.from_pylist([{name: getattr(BEFORE, name) for name in old}]), tmp_path / "fleet.parquet")

    assert read_fleet(tmp_path / "fleet.parquet") == [BEFORE]


def test_another_log_is_refused(tmp_path: Path) -> None:
    pq.write_table(log([1]), tmp_path / "fleet.parquet")
    with pytest.raises(ValueError, match="not a log of this kind"):
        read_fleet(tmp_path / "fleet.parquet")
