from __future__ import annotations

from dataclasses import replace

from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.loadgen.sending.progress import Progress


def record(
    outcome: Outcome, *, phase: str = "measured", sent_s: float | None = None, first_token_s: float | None = None
) -> RequestRecord:
    made = RequestRecord("id", "", 0, 0, phase, "-", "s", 0, "g", "interactive", scheduled_s=1.0, outcome=outcome)
    return replace(made, sent_s=sent_s, first_token_s=first_token_s)


def test_what_has_not_happened_yet_is_unknown() -> None:
    figures = Progress().figures()
    assert figures["completed"] == 0
    assert (figures["ttft_p50_ms"], figures["ttft_p95_ms"], figures["lag_max_ms"]) == (None, None, None)


def test_times_to_the_first_token_count_from_the_schedule_and_in_the_measured_phase() -> None:
    progress = Progress()
    progress.add(record(Outcome.COMPLETED, sent_s=1.004, first_token_s=1.1))
    progress.add(record(Outcome.COMPLETED, phase="prime", sent_s=1.0, first_token_s=9.0))
    figures = progress.figures()
    assert (figures["ttft_p50_ms"], figures["lag_max_ms"], figures["completed"]) == (100.0, 4.0, 2)
    progress.add(record(Outcome.FAILED))
    figures = progress.figures()
    assert (figures["failed"], figures["ttft_p50_ms"], progress.ended) == (1, 100.0, 3)
