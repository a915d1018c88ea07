"""Figures of a simulated run, as the claims quote them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixwatch.loadgen.request_log.records import RequestRecord
from prefixwatch.simulator.result import SimulationResult


def hit_percent(result: SimulationResult) -> float:
    """Blocks found, of all asked for, in percent; 0 for a run that asked for none."""
    return 100 * (result.block_hit_ratio or 0.0)


def max_over_mean(result: SimulationResult) -> float:
    """Requests in flight on the busiest worker over the mean, over time; 1 for a fleet that never had any."""
    return result.in_flight_max_over_mean or 1.0


def ttft_s(records: Sequence[RequestRecord], percentile: float) -> float:
    """Of the requests that got a first token."""
    return float(np.percentile([record.ttft_s for record in records if record.ttft_s is not None], percentile))


def output_tokens_per_second(records: Sequence[RequestRecord]) -> float:
    """From the first arrival to the last end."""
    ends = [record.end_s for record in records if record.end_s is not None]
    return sum(record.output_tokens or 0 for record in records) / (max(ends) - records[0].scheduled_s)
