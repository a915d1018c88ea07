"""How evenly a fleet's requests were spread over its workers."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.records import RequestRecord


def max_over_mean_in_flight(records: Sequence[RequestRecord], workers: Sequence[str]) -> float | None:
    """Requests in flight on the busiest worker over the fleet's mean, averaged over the time any was in flight."""
    changes: list[tuple[float, int, str]] = []
    for record in records:
        if record.sent_s is not None and record.end_s is not None and record.end_s > record.sent_s:
            changes += [(record.sent_s, 1, record.worker), (record.end_s, -1, record.worker)]
    changes.sort()
    running = dict.fromkeys(workers, 0)
    total, since_s = 0, 0.0
    weighted = seconds = 0.0
    for now_s, change, worker in changes:
        if total:
            weighted += max(running.values()) * len(running) / total * (now_s - since_s)
            seconds += now_s - since_s
        running[worker] += change
        total += change
        since_s = now_s
    return weighted / seconds if seconds else None
