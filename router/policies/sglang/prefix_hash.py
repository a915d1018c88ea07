"""Prefix hash: a prompt's opening has a home on a ring; an overloaded home is passed over.

Key: XXH3-64 (seed 0) over the first `prefix_token_count` token ids as u32 little-endian, as 16 hex digits,
looked up on the ring of `router.policies.shared.hash_ring`.

The home takes the request unless it is overloaded. With T requests in flight on the n candidates and the
average counted with the newcomer, `avg = (T + 1) / n`:

    overloaded  ⇔  in_flight > max(avg × load_factor, avg + balance_abs_threshold)

An overloaded home gives way to the least loaded worker that isn't overloaded (the first listed on equal load; the
ring isn't walked); if all are, home takes it anyway. A prompt without token ids goes to the least loaded.

Defaults: prefix_token_count 256, load_factor 1.25, balance_abs_threshold 10. Deterministic.

Source: smg `prefix_hash` since smg#2150. The gateway also hashes plain text and routing-key hints, which a
router that always tokenises has no need of. `prefix_hash_v1` is the generation before, without the margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from xxhash import xxh3_64_intdigest

from prefixwatch.kvcache.blocks import Tokens, as_tokens
from prefixwatch.router.policies.shared.hash_ring import HashRing
from prefixwatch.router.policy import Decision, Fleet, Needs, Policy, RouteRequest, Worker


@dataclass(frozen=True, slots=True)
class PrefixHashOptions:
    prefix_token_count: int = 256
    load_factor: float = 1.25
    balance_abs_threshold: float = 10.0


class PrefixHash(Policy):
    """The prompt's opening has a home on a hash ring; spills when the home is clearly overloaded."""

    name = "prefix_hash"
    source = "smg prefix_hash (with smg#2150's absolute margin)"
    needs = Needs(tokens=True)
    reasons = ("ring_hit", "load_balance_walk", "all_overloaded", "no_tokens")
    deterministic = True
    Options: ClassVar[type] = PrefixHashOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self._ring = HashRing()

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        workers = fleet.workers
        if not len(request.tokens):
            return Decision(_first_least_loaded(workers).name, "no_tokens")
        by_name = {worker.name: worker for worker in workers}
        self._ring.add(by_name)
        home = self._ring.home(prefix_key(request.tokens, self.options.prefix_token_count), by_name) or workers[0].name
        limit = self._limit(sum(worker.in_flight for worker in workers), len(workers))
        if by_name[home].in_flight <= limit:
            return Decision(home, "ring_hit")
        passing = [worker for worker in workers if worker.in_flight <= limit]
        if not passing:
            return Decision(home, "all_overloaded")
        return Decision(_first_least_loaded(passing).name, "load_balance_walk")

    def on_worker_removed(self, worker: str) -> None:
        self._ring.remove(worker)

    def _limit(self, total_in_flight: int, workers: int) -> float:
        """Most requests in flight that a worker may have and still take another."""
        average = (total_in_flight + 1) / workers
        return float(max(average * self.options.load_factor, average + self.options.balance_abs_threshold))


def prefix_key(tokens: Tokens, prefix_token_count: int = 256) -> str:
    """The ring key of a prompt's opening."""
    return f"{xxh3_64_intdigest(as_tokens(tokens[:prefix_token_count]).tobytes()):016x}"


def _first_least_loaded(workers: Sequence[Worker]) -> Worker:
    return min(workers, key=lambda worker: worker.in_flight)
