"""What a request log says of predictions, and logs written before it said so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from prefixwatch.loadgen.grading.grade import grade
from prefixwatch.loadgen.grading.model import PredictionCount
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord, read_requests, write_requests
from prefixwatch.loadgen.sending.prediction import note_prediction_causes

ADDED_LATER = ["scores", "predicted_queue_s", "predicted_prefill_s", "prediction_cause"]


def a_record(index: int, *, sent_s: float, first_token_s: float | None, **fields: Any) -> RequestRecord:
    record = RequestRecord(
        id=str(index),
        policy="score",
        repeat=0,
        index=index,
        phase="measured",
        tenant="-",
        session=f"s{index}",
        turn=0,
        group="g",
        request_class="chat",
        scheduled_s=sent_s,
        sent_s=sent_s,
        first_token_s=first_token_s,
        end_s=first_token_s,
        outcome=Outcome.COMPLETED,
        planned_prompt_tokens=320,
        planned_shared_tokens=160,
        prompt_tokens=320,
        worker="w0",
        reason="hit_deepest",
        predicted_tokens=160,
        cached_tokens=0,
    )
    return replace(record, **fields)


def test_a_peer_without_a_first_token_makes_a_miss_concurrent() -> None:
    records = [
        a_record(0, sent_s=0.0, first_token_s=1.0, predicted_tokens=0),
        a_record(1, sent_s=0.9, first_token_s=2.0),
        a_record(2, sent_s=0.9, first_token_s=2.0, worker="w1"),
        a_record(3, sent_s=0.9, first_token_s=2.0, group="other"),
        a_record(4, sent_s=0.9, first_token_s=2.0, group="other", session="s0"),
        a_record(5, sent_s=2.1, first_token_s=3.0),
        a_record(6, sent_s=3.1, first_token_s=4.0, cached_tokens=160),
        a_record(7, sent_s=3.1, first_token_s=None),
    ]
    note_prediction_causes(records)
    assert [record.prediction_cause for record in records] == [
        "exact",
        "concurrent_miss",
        "over_credited",
        "over_credited",
        "concurrent_miss",
        "over_credited",
        "exact",
        "",
    ]


def test_a_policys_grade_has_its_reasons_and_its_predictions_by_cause() -> None:
    records = [
        a_record(0, sent_s=0.0, first_token_s=1.0, predicted_tokens=0, reason="miss_least_cost"),
        a_record(1, sent_s=0.9, first_token_s=2.0),
        a_record(2, sent_s=2.9, first_token_s=4.0, cached_tokens=144),
        a_record(3, sent_s=4.9, first_token_s=6.0, cached_tokens=None),
    ]
    note_prediction_causes(records)
    own = grade(records, [])["score"]
    assert own.reasons == {"hit_deepest": 3, "miss_least_cost": 1}
    assert own.prediction is not None
    assert (own.prediction.requests, own.prediction.predicted_tokens, own.prediction.delivered_tokens) == (3, 320, 144)
    assert own.prediction.within_block_ratio == 2 / 3
    assert own.prediction.by_cause == {
        "concurrent_miss": PredictionCount(requests=1, predicted_tokens=160, delivered_tokens=0),
        "within_block": PredictionCount(requests=1, predicted_tokens=160, delivered_tokens=144),
        "exact": PredictionCount(requests=1, predicted_tokens=0, delivered_tokens=0),
    }


def test_a_log_without_a_router_has_neither() -> None:
    (own,) = grade([a_record(0, sent_s=0.0, first_token_s=1.0, predicted_tokens=None, reason="")], []).values()
    assert (own.reasons, own.prediction) == ({}, None)


def test_a_log_from_before_these_columns_is_still_read(tmp_path: Path) -> None:
    record = a_record(0, sent_s=0.0, first_token_s=1.0)
    write_requests(tmp_path / "now.parquet", [replace(record, scores='{"w0":1.0}', predicted_queue_s=0.5)])
    (read,) = read_requests(tmp_path / "now.parquet")
    assert (read.scores, read.predicted_queue_s, read.predicted_prefill_s) == ('{"w0":1.0}', 0.5, None)
    pq.write_table(pq.read_table(tmp_path / "now.parquet").drop_columns(ADDED_LATER), tmp_path / "old.parquet")
    assert read_requests(tmp_path / "old.parquet") == [record]
