"""Progress of a run, reported every second while it sends, at a cost that hardly grows with the run."""

from __future__ import annotations

from array import array
from collections import Counter

import numpy as np

from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord


class Progress:
    """What the ended requests of a run add up to so far."""

    def __init__(self) -> None:
        self.ended = 0
        self._outcomes: Counter[Outcome] = Counter()
        self._ttft_seconds = array("d")
        self._lag_max_seconds: float | None = None

    def add(self, record: RequestRecord) -> None:
        self.ended += 1
        self._outcomes[record.outcome] += 1
        if record.ttft_s is not None and record.phase == "measured":
            self._ttft_seconds.append(record.ttft_s)
        lag = record.client_lag_s
        if lag is not None:
            self._lag_max_seconds = lag if self._lag_max_seconds is None else max(self._lag_max_seconds, lag)

    def figures(self) -> dict[str, int | float | None]:
        """One flat map; what isn't known yet is None. Times to the first token are those of the measured phase."""
        p50, p95 = self._ttft_quantiles()
        return {
            "completed": self._outcomes[Outcome.COMPLETED],
            "refused": self._outcomes[Outcome.REFUSED],
            "failed": self._outcomes[Outcome.FAILED],
            "timed_out": self._outcomes[Outcome.TIMED_OUT],
            "cut_off": self._outcomes[Outcome.CUT_OFF],
            "ttft_p50_ms": _milliseconds(p50),
            "ttft_p95_ms": _milliseconds(p95),
            "lag_max_ms": _milliseconds(self._lag_max_seconds),
        }

    def _ttft_quantiles(self) -> tuple[float | None, float | None]:
        if not self._ttft_seconds:
            return None, None
        # A copy: as long as numpy looks at the array itself, it can't grow.
        seconds = np.array(self._ttft_seconds)
        middle, high = len(seconds) // 2, len(seconds) * 95 // 100
        ordered = np.partition(seconds, (middle, high))
        return float(ordered[middle]), float(ordered[high])


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000.0, 2)
