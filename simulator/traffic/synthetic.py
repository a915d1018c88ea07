"""Synthetic requests for the fleet simulator: groups that share an opening, and sessions that grow turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE, Hashes, Tokens, block_hashes
from prefixwatch.simulator.traffic.trace import SimulatedRequest


@dataclass(frozen=True, slots=True)
class SharedPrefixWorkload:
    """Poisson arrivals; each prompt is a group's opening and a tail of its own; groups have Zipf popularity."""

    requests: int = 1000
    rate_per_second: float = 10.0
    groups: int = 20
    zipf_exponent: float = 1.1
    shared_blocks: int = 8
    """Blocks of the opening; 0 for traffic without any reuse."""
    unique_blocks: int = 2
    output_tokens: int = 16
    block_size: int = DEFAULT_BLOCK_SIZE


def shared_prefix_requests(workload: SharedPrefixWorkload, seed: int) -> list[SimulatedRequest]:
    """The requests of this workload; the same seed gives the same ones."""
    rng = np.random.default_rng(seed)
    size = workload.block_size
    popularity = 1.0 / np.arange(1, workload.groups + 1) ** workload.zipf_exponent
    groups = rng.choice(workload.groups, workload.requests, p=popularity / popularity.sum())
    arrivals = np.cumsum(rng.exponential(1.0 / workload.rate_per_second, workload.requests))
    openings = [_random_tokens(rng, workload.shared_blocks * size) for _ in range(workload.groups)]
    requests = []
    for k, (group, arrival) in enumerate(zip(groups.tolist(), arrivals.tolist(), strict=True)):
        tokens = np.concatenate([openings[group], _random_tokens(rng, workload.unique_blocks * size)])
        requests.append(
            _request(
                f"r{k}", arrival, tokens, output_tokens=workload.output_tokens, block_size=size, group=f"group-{group}"
            )
        )
    return requests


def session_requests(
    sessions: int,
    turns: int,
    *,
    system_blocks: int = 4,
    turn_blocks: int = 4,
    think_seconds: float = 10.0,
    output_tokens: int = 16,
    block_size: int = DEFAULT_BLOCK_SIZE,
    seed: int = 0,
) -> list[SimulatedRequest]:
    """Conversations after a common system prompt, one after another, each turn repeating all before it."""
    rng = np.random.default_rng(seed)
    system = _random_tokens(rng, system_blocks * block_size)
    requests = []
    for session in range(sessions):
        tokens = system
        for turn in range(turns):
            tokens = np.concatenate([tokens, _random_tokens(rng, turn_blocks * block_size)])
            arrival = think_seconds * (session * turns + turn)
            name = f"session-{session}"
            requests.append(
                _request(
                    f"{name}-{turn}", arrival, tokens, output_tokens=output_tokens, block_size=block_size, session=name
                )
            )
    return requests


def _request(
    request_id: str,
    arrival_s: float,
    tokens: Tokens,
    *,
    output_tokens: int,
    block_size: int,
    group: str = "",
    session: str = "",
) -> SimulatedRequest:
    hashes: Hashes = block_hashes(tokens, block_size)
    return SimulatedRequest(
        id=request_id,
        arrival_s=arrival_s,
        prompt_tokens=len(tokens),
        output_tokens=output_tokens,
        blocks=hashes,
        tokens=lambda: tokens,
        session=session,
        group=group,
    )


def _random_tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, 2**31, count, dtype=np.uint32)


def infinite_cache_tokens(requests: Sequence[SimulatedRequest], block_size: int) -> list[int]:
    """Leading prompt tokens of each request that earlier ones carried too: what a cache without limit could reuse."""
    lengths = np.array([len(request.blocks) for request in requests], dtype=np.int64)
    if not lengths.sum():
        return [0] * len(requests)
    blocks = np.concatenate([request.blocks for request in requests])
    _, first, which = np.unique(blocks, return_index=True, return_inverse=True)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    fresh = np.append(np.flatnonzero(first[which] >= np.repeat(starts, lengths)), len(blocks))
    depths = np.minimum(fresh[np.searchsorted(fresh, starts)], ends) - starts
    prompts = np.array([request.prompt_tokens for request in requests])
    shared: list[int] = np.minimum(depths * block_size, prompts).tolist()
    return shared
