"""A server that stalls 5 s once: what an open loop measures, and beside it what a closed loop makes of the same.

gatling/gatling#2077, thelastpickle/tlp-stress#49 (LT20). A closed loop waits with the server and so sends next to
nothing during the stall: the stall becomes a handful of bad samples among hundreds, and p99 says all was well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import gevent
import numpy as np
import pytest

from prefixwatch.loadgen.client.http_client import HttpClient, Target
from prefixwatch.loadgen.grading.grade import grade_policy
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.grading.model import PolicyGrade
from prefixwatch.loadgen.plan.request import Plan, PlannedRequest
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.scenario.model import Timeouts
from prefixwatch.loadgen.sending.open_loop import OpenLoop, RequestOptions
from tests.loadgen.conftest import Connection, FakeServer, Script

Serve = Callable[[Script], FakeServer]

STALL_BEGINS, STALL_SECONDS = 1.0, 5.0
RUN_SECONDS, EVERY_SECONDS = 7.0, 0.02
USERS = 3


class Stalls:
    """Answers at once, but for one stall that begins a second after the first request."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._lock = threading.Lock()

    def __call__(self, server: Connection, _: bytes) -> None:
        with self._lock:
            self._begun = self._begun or time.monotonic()
            at = time.monotonic() - self._begun
        if STALL_BEGINS <= at < STALL_BEGINS + STALL_SECONDS:
            time.sleep(STALL_BEGINS + STALL_SECONDS - at)
        server.start_stream()
        server.content("A")
        server.end_stream()


def measured(server: FakeServer, requests: int, users: int | None) -> PolicyGrade:
    plan = [
        PlannedRequest(
            index=i,
            phase="measured",
            scheduled_s=i * EVERY_SECONDS,
            tenant="-",
            session=f"s{i}",
            turn=0,
            group="g",
            request_class="c",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=1,
            prompt_tokens=1,
            shared_tokens=0,
            think_seconds=EVERY_SECONDS,
        )
        for i in range(requests)
    ]
    client = HttpClient(Target.parse(server.url), Timeouts())
    loop = OpenLoop(Plan("t", 0, "n", "m", plan, concurrency=users), client, RequestOptions(model="m", policy="p"))
    loop.measure(10.0)
    client.close()
    return grade_policy(Measured(Columns.of(loop.records)))


@pytest.mark.timeout(60)
def test_the_open_loops_p99_is_the_analytic_one_and_the_closed_loops_is_wrong(serve: Serve) -> None:
    requests = int(RUN_SECONDS / EVERY_SECONDS)
    due = np.arange(requests) * EVERY_SECONDS
    waits = np.where(
        (due >= STALL_BEGINS) & (due < STALL_BEGINS + STALL_SECONDS), STALL_BEGINS + STALL_SECONDS - due, 0
    )
    analytic_p99_ms = float(np.percentile(waits, 99)) * 1e3

    both = [gevent.spawn(measured, serve(Stalls()), requests, users) for users in (None, USERS)]  # side by side
    gevent.joinall(both, raise_error=True)
    opened, closed = (run.value for run in both)

    open_p99_ms, closed_p99_ms = opened.value("ttft_p99"), closed.value("ttft_p99")
    print(f"p99: analytic {analytic_p99_ms:.0f} ms, open {open_p99_ms:.0f} ms, closed {closed_p99_ms:.0f} ms")
    # Within what a busy machine takes to answer the 250 requests that the stall's end lets go at once.
    assert open_p99_ms == pytest.approx(analytic_p99_ms, rel=0.1)
    assert closed_p99_ms is not None
    assert closed_p99_ms < analytic_p99_ms / 10
