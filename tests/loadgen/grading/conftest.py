"""Request logs to grade: single records by hand, and a small queueing fleet for whole runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord

MakeRecord = Callable[..., RequestRecord]
MakeLog = Callable[..., list[RequestRecord]]

COMPLETED = RequestRecord(
    id="r",
    policy="round_robin",
    repeat=0,
    index=0,
    phase="measured",
    tenant="acme",
    session="s1",
    turn=0,
    group="g1",
    request_class="interactive",
    scheduled_s=0.0,
    sent_s=0.0,
    first_token_s=0.1,
    end_s=0.4,
    outcome=Outcome.COMPLETED,
    status=200,
    planned_prompt_tokens=160,
    planned_shared_tokens=100,
    prompt_tokens=160,
    cached_tokens=96,
    output_tokens=16,
    worker="w0",
    decision_us=50.0,
)


@pytest.fixture(scope="session")
def make_record() -> MakeRecord:
    """A completed request; name the fields that matter."""
    return lambda **changed: replace(COMPLETED, **changed)


@pytest.fixture(scope="session")
def make_log() -> MakeLog:
    """A run of policies over one plan; see `serve`."""

    def log(
        *policies: str, repeats: int = 3, requests: int = 240, shared_tokens: int = 1600, seed: int = 0
    ) -> list[RequestRecord]:
        return [
            record
            for repeat in range(repeats)
            for number, policy in enumerate(policies)
            for record in serve(policy, repeat, requests, shared_tokens, seeds=(seed, 1000 * number + repeat))
        ]

    return log


def serve(
    policy: str, repeat: int, requests: int, shared_tokens: int, *, seeds: tuple[int, int]
) -> list[RequestRecord]:
    """Four first-come-first-served workers that prefill 8,000 tokens a second and hold six prefixes each.

    `round_robin` takes turns; any other policy takes the least backlog after what a worker's cache saves. Every
    policy and repeat gets the plan of the first seed; only the service times differ, by the second.
    """
    plan, noise = np.random.default_rng(seeds[0]), np.random.default_rng(seeds)
    arrivals = np.cumsum(plan.exponential(1 / 16, requests))
    groups = plan.zipf(1.3, requests) % 24
    unique = plan.integers(100, 200, requests)
    free_at = np.zeros(4)
    held: list[list[int]] = [[] for _ in range(4)]
    seen: set[int] = set()
    records = []
    for i, (at, group) in enumerate(zip(arrivals.tolist(), groups.tolist(), strict=True)):
        prompt = shared_tokens + int(unique[i])
        hits = [shared_tokens // 16 * 16 if group in cache else 0 for cache in held]
        backlog = [max(0.0, free_at[w] - at) + (prompt - hits[w]) / 8000 for w in range(4)]
        worker = i % 4 if policy.startswith("round_robin") else int(np.argmin(backlog))
        busy = (prompt - hits[worker]) / 8000 * noise.uniform(0.9, 1.1) + 0.01
        free_at[worker] = max(at, free_at[worker]) + busy
        first = float(free_at[worker]) + 0.002
        held[worker] = [*(g for g in held[worker] if g != group), group][-6:]
        records.append(
            replace(
                COMPLETED,
                id=f"{policy}-{repeat}-{i}",
                policy=policy,
                repeat=repeat,
                index=i,
                tenant="acme" if group % 3 else "globex",
                session=f"s{i}",
                group=f"g{group}",
                scheduled_s=at,
                sent_s=at + 0.0004,
                first_token_s=first,
                end_s=first + 0.02 * 27 * noise.uniform(0.9, 1.2),
                planned_prompt_tokens=prompt,
                planned_shared_tokens=shared_tokens if group in seen else 0,
                prompt_tokens=prompt,
                cached_tokens=hits[worker],
                output_tokens=28,
                worker=f"w{worker}",
                decision_us=float(noise.lognormal(4, 0.3)),
            )
        )
        seen.add(group)
    return records
