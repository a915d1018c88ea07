"""A routing policy put to the test: does it leave an overloaded worker that holds the whole prompt for an idle one?"""

from __future__ import annotations

import numpy as np

from kvcache.blocks import block_hashes
from router.config import PolicyConfig
from router.policies import make_policy
from router.policy import Fleet, LoadReport, RouteRequest, Worker

_TRIALS = 20
_TOKENS = 1024
_BLOCK_SIZE = 16
_MOST = 0.9


LOAD_BLIND = frozenset({"round_robin", "session", "prefixaware", "kvaware"})
"""Policies that look at no load by design."""


def weighs_load(config: PolicyConfig) -> bool | None:
    """Whether nearly all of some prompts go to the idle worker; chance alone, or a ring, sends it half of them.

    None for a policy that keeps books of its own, which a trial of single decisions doesn't fill.
    """
    if config.name in LOAD_BLIND:
        return False
    policy = make_policy(config.name, seed=config.seed, options=config.options)
    holder = Worker(
        "holder",
        in_flight=200,
        prefill_tokens=400_000,
        served=200,
        report=LoadReport(0.0, running=128, waiting=72, kv_usage_ratio=0.99, waiting_uncached_tokens=400_000),
    )
    idle = Worker("idle", report=LoadReport(0.0, running=0, waiting=0, kv_usage_ratio=0.0, waiting_uncached_tokens=0))
    tokens = np.arange(_TOKENS, dtype=np.uint32)
    blocks = block_hashes(tokens, _BLOCK_SIZE)
    fleet = Fleet([holder, idle], lambda _request: {holder.name: len(blocks)}, 0.0, "events")
    left = 0
    for number in range(_TRIALS):
        request = RouteRequest(
            f"r{number}", _TOKENS, tokens, blocks, _BLOCK_SIZE, 16, session=f"s{number}", text=f"prompt {number}"
        )
        left += policy.choose(request, fleet).worker == idle.name
    return True if left >= _MOST * _TRIALS else None
