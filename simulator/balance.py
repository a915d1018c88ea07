"""How evenly a fleet's requests were spread over its workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prefixwatch.loadgen.request_log.records import RequestRecord


def max_over_mean_in_flight(records: Sequence[RequestRecord], workers: Sequence[str]) -> float | None:
    """Requests in flight on the busiest worker over the fleet's mean, averaged over the time any was in flight."""
    changes: list[tuple[float, int, str]] = []
    for record in records:
        if record.sent_s is not None and record.end_s is not None and record.end_s > record.sent_s:
            changes += [(record.sent_s, 1, record.worker), (record.end_s, -1, record.worker)]
    changes.sort()
    running = dict.fromkeys(workers, 0)
    workers_at = Counter({0: len(running)})  # by requests in flight
    most = total = 0
    since_s = weighted = seconds = 0.0
    for now_s, change, worker in changes:
        if total:
            weighted += most * len(running) / total * (now_s - since_s)
            seconds += now_s - since_s
        before = running[worker]
        running[worker] = after = before + change
        workers_at[before] -= 1
        workers_at[after] += 1
        if after > most or (before == most and not workers_at[most]):
            most = after
        total += change
        since_s = now_s
    return weighted / seconds if seconds else None
