"""The scorers of llm-d's scheduler, each 0 … 1 for a worker, and the picker that its profiles use.

Source: llm-d-router (formerly llm-d-inference-scheduler), plugins `queue-scorer`, `kv-cache-utilization-scorer`,
`max-score-picker`. Not kept: there a worker that wasn't scraped counts as empty, and so draws all traffic; here it
counts as the most loaded of those that report.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from prefixwatch.router.policy import Worker, known_or_highest, kv_usages


def queue_scores(workers: Sequence[Worker]) -> list[float]:
    """(max − waiting) / (max − min); 1 for all when they are equal."""
    waiting = known_or_highest([None if worker.report is None else worker.report.waiting for worker in workers])
    most, fewest = max(waiting), min(waiting)
    if most == fewest:
        return [1.0] * len(waiting)
    return [(most - count) / (most - fewest) for count in waiting]


def kv_cache_scores(workers: Sequence[Worker]) -> list[float]:
    """1 − KV usage."""
    return [1.0 - usage for usage in known_or_highest(kv_usages(workers))]


def weighted_scores(
    workers: Sequence[Worker],
    prefix_scores: Mapping[str, float],
    *,
    prefix_weight: float,
    queue_weight: float,
    kv_weight: float,
) -> dict[str, float]:
    """The profile's weighted sum by worker name."""
    queue, kv = queue_scores(workers), kv_cache_scores(workers)
    return {
        worker.name: prefix_weight * prefix_scores.get(worker.name, 0.0) + queue_weight * queue[k] + kv_weight * kv[k]
        for k, worker in enumerate(workers)
    }


def pick_max_score(scores: Mapping[str, float], rng: random.Random) -> str:
    """The highest score; uniform among ties."""
    best = max(scores.values())
    ties = [name for name, score in scores.items() if score == best]
    return ties[0] if len(ties) == 1 else rng.choice(ties)
