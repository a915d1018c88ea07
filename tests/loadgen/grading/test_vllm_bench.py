"""The result format of `vllm bench serve`, by its definitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from prefixwatch.loadgen.report.vllm_bench import vllm_bench_result
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord, table_of
from prefixwatch.slo.build import load_objectives

MakeRecord = Callable[..., RequestRecord]


def sent_late(make_record: MakeRecord, index: int) -> RequestRecord:
    """Due at `index`, sent 0.2 s later, first token 0.1 s after that, 4 more tokens in 2 chunks within 0.2 s."""
    return make_record(
        index=index, scheduled_s=float(index), sent_s=index + 0.2, first_token_s=index + 0.3, end_s=index + 0.5,
        chunk_gaps_ms=[150.0, 50.0], prompt_tokens=100, output_tokens=5,
    )  # fmt: skip


def test_times_count_from_the_sending_and_chunks_count_as_tokens(make_record: MakeRecord) -> None:
    found = vllm_bench_result(table_of([sent_late(make_record, k) for k in range(4)]), [], {"label": "p"})

    assert found["label"] == "p"
    assert found["median_ttft_ms"] == pytest.approx(100.0)
    assert found["median_e2el_ms"] == pytest.approx(300.0)
    assert found["median_tpot_ms"] == pytest.approx(200.0 / 4)
    assert (found["mean_itl_ms"], found["p99_itl_ms"]) == (pytest.approx(100.0), pytest.approx(150.0))
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (400, 20)
    assert found["duration"] == pytest.approx(3.3)
    assert found["request_throughput"] == pytest.approx(4 / 3.3)
    assert found["request_goodput"] is None
    assert found["max_concurrent_requests"] == 1


def test_only_completed_requests_are_in_its_percentiles(make_record: MakeRecord) -> None:
    lost = replace(sent_late(make_record, 1), outcome=Outcome.TIMED_OUT, first_token_s=None, end_s=60.0)

    found = vllm_bench_result(table_of([sent_late(make_record, 0), lost]), load_objectives(["ttft"]), {})

    assert (found["completed"], found["failed"], found["num_prompts"]) == (1, 1, 2)
    assert found["p99_ttft_ms"] == pytest.approx(100.0)
    assert found["request_goodput"] == pytest.approx(1 / 59.8)


def test_what_nothing_supports_is_null(make_record: MakeRecord) -> None:
    refused = make_record(outcome=Outcome.REFUSED, first_token_s=None, end_s=None, output_tokens=None)
    found = vllm_bench_result(table_of([refused]), [], {})
    assert (found["median_ttft_ms"], found["duration"], found["request_throughput"]) == (None, None, None)
