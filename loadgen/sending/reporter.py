"""What Locust gets of a run: ended requests in its statistics, as rows *E2E* and *TTFT*, and the exit code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import locust.stats
from locust.env import Environment

from prefixwatch.loadgen.client.answer_reader import Exchange
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord
from prefixwatch.loadgen.swarm import verdict_tab


def _exact_bucket(response_time: float) -> float:
    """Locust's key for counting equal times: tenths of a millisecond, where its own keeps two digits.

    Rounded down, so that no percentile passes the maximum.
    """
    return math.floor(response_time * 10.0) / 10.0


class RequestNotGoodError(Exception):
    """How Locust's failure table names a request that didn't complete."""


class LocustReporter:
    """Reports each ended request to Locust's statistics."""

    def __init__(self, environment: Environment, name: str) -> None:
        rounding: Any = locust.stats
        rounding.bucket_response_time = _exact_bucket  # the name that Locust documents for changing how it rounds
        self._stats: Any = environment.stats
        self._fire: Any = environment.events.request.fire
        self._name = name

    def __call__(self, record: RequestRecord, exchange: Exchange) -> None:
        if record.phase != "measured" or record.end_s is None:
            return
        if record.ttft_s is not None:
            # Past the request event, which would count this request a second time in the Aggregated row.
            self._stats.get(self._name, "TTFT").log(record.ttft_s * 1000.0, 0)
        failure = None
        if record.outcome is not Outcome.COMPLETED:
            failure = RequestNotGoodError(f"{record.outcome.value}: {record.error}")
        self._fire(
            request_type="E2E",
            name=self._name,
            response_time=(record.end_s - record.scheduled_s) * 1000.0,
            response_length=exchange.body_bytes,
            exception=failure,
            context={"tenant": record.tenant, "group": record.group},
        )


def grade_into(folder: Path, slos: Sequence[str], environment: Any) -> None:
    """Grade the run in this folder, write the results beside it, print the verdict and set Locust's exit code."""
    from prefixwatch.loadgen.grading.summary import exit_code, verdict_sentence  # noqa: PLC0415  # a report takes a second
    from prefixwatch.loadgen.results.run_folder import read_run  # noqa: PLC0415
    from prefixwatch.loadgen.results.write import write_graded  # noqa: PLC0415

    summary = write_graded(folder, read_run(folder, slos))
    print(verdict_sentence(summary), flush=True)
    verdict_tab.show(environment, summary, folder)
    environment.process_exit_code = exit_code(summary)
