"""Requests and fleets for tests of policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from prefixwatch.kvcache.blocks import as_tokens, block_hashes
from prefixwatch.router.policy import Decision, Fleet, Policy, RouteRequest, Worker

BLOCK = 16


def a_request(first_token: int = 1, prompt_tokens: int = 160, request_id: str = "r", **fields: Any) -> RouteRequest:
    """A prompt of consecutive token ids; the keywords are further fields of the request."""
    tokens = as_tokens(np.arange(first_token, first_token + prompt_tokens))
    return RouteRequest(request_id, prompt_tokens, tokens, block_hashes(tokens, BLOCK), BLOCK, **fields)


def a_fleet(in_flight: list[int], hits: Mapping[str, int] | None = None, now: float = 0.0, **fields: Any) -> Fleet:
    """Workers w0, w1, …; each keyword gives a `Worker` field for all of them, as a list.

    The truth that a simulator tells: no backlog, unless given, and 1 ms a computed token.
    """
    fields.setdefault("backlog_seconds", [0.0] * len(in_flight))
    workers = [
        Worker(f"w{k}", in_flight=load, **{name: values[k] for name, values in fields.items()})
        for k, load in enumerate(in_flight)
    ]
    return Fleet(
        workers, lambda request: hits or {}, now, prefill_seconds=lambda prompt, cached: (prompt - cached) / 1000
    )


def serve(policy: Policy, fleet: Fleet, request: RouteRequest) -> Decision:
    """Place the request and finish it at once."""
    decision = policy.choose(request, fleet)
    for happened in (policy.on_admit, policy.on_first_token, policy.on_end):
        happened(request, decision.worker, fleet.now_seconds)
    return decision


def serve_at_once(policy: Policy, fleet: Fleet, requests: list[RouteRequest]) -> list[Decision]:
    """Each request placed and finished before the next: nothing is ever in flight at a decision."""
    return [serve(policy, fleet, request) for request in requests]
