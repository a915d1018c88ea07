"""KV aware, as first released: the first worker that the cache controller names, if little is left to compute there.

The controller cuts the prompt into chunks of `chunk_tokens`; each chunk is credited to one worker, the first
registered that holds it, and the answer lists the workers in the order of their first chunk with the end of their
last one. The policy takes the first entry, i.e. the first worker listed that holds the first chunk, whatever others
hold beyond it, and goes there if

    matched ≥ max(L − kv_aware_threshold, 0)        matched: its whole chunks · chunk_tokens, which may exceed L

Otherwise, and if nobody holds a chunk: by session or request rate, as `session` does.

Defaults: kv_aware_threshold 2000 tokens, chunk_tokens 256, statistics_window_seconds 60. Ties: the first listed
(candidates stand for the controller's order of registration). Deterministic.

Known faults, kept: the first holder is credited, not the longest (production-stack#1055 corrects it). Not
kept: chats were tokenised as an empty prompt (until #1045), and tokenising blocked the event loop (#1016, #1025).

Source: vllm-project/production-stack `kvaware` before #1055, with LMCache 0.5.6's controller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prefixwatch.router.policies.shared.session_placement import REASONS, STATISTICS_WINDOW_SECONDS, SessionPlacement
from prefixwatch.router.policy import Decision, Fleet, Needs, Policy, RouteRequest


@dataclass(frozen=True, slots=True)
class KvAwareOptions:
    kv_aware_threshold: int = 2000
    chunk_tokens: int = 256
    statistics_window_seconds: float = STATISTICS_WINDOW_SECONDS


class KvAware(Policy):
    """The first worker found to hold the prompt's start, if at most 2000 tokens are left to compute."""

    name = "kvaware"
    source = "vllm-project/production-stack kvaware (before #1055)"
    needs = Needs(tokens=True, cache_view=True)
    reasons = ("first_holder", *REASONS)
    deterministic = True
    Options = KvAwareOptions
    options: KvAwareOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._fallback = SessionPlacement(self.options.statistics_window_seconds)

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        depths, chunk = fleet.lookup(request), self.options.chunk_tokens
        for worker in fleet.workers:
            depth = depths.get(worker.name, 0)
            matched_tokens = depth * request.block_size // chunk * chunk
            if matched_tokens:
                if matched_tokens >= request.prompt_tokens - self.options.kv_aware_threshold:
                    return Decision(worker.name, "first_holder", depth)
                break
        return self._fallback.place(request, fleet)

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self._fallback.rates.arrived(worker, now_seconds)

    def on_worker_removed(self, worker: str) -> None:
        self._fallback.forget(worker)
