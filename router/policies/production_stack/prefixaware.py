"""Prefix aware: a worker that served the longest part of this text before, whatever its load.

The text is cut into chunks of `chunk_characters`, the short tail included, each hashed with XXH64; a trie of chunks
notes who served which path. The walk goes on while the next chunk is known for one of the candidates; the answer is
a uniformly random one of the last such set, all candidates where nothing matches. Then the path is noted for it.
The match counts whole chunks, also for a short tail. Below `prefix_min_match_length` characters: lowest request
rate, as in `session`, still noted.

Defaults: chunk_characters 128, prefix_min_match_length 0, statistics_window_seconds 60. Ties: random. Here a path is
one chained hash (XXH64 of the chunk and the hash before it) instead of a trie node, which finds the same paths.

Where there is no text (traces, prompts of token ids) the tokens' bytes stand for it, four a token: 32 tokens a
chunk, the usual four characters a token. Paths are kept apart by tenant.

Known faults, kept: no load term, and paths are never dropped while their worker is there, so memory grows until
none is left (production-stack#687).

Source: vllm-project/production-stack `prefixaware`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xxhash import xxh64_intdigest

from prefixwatch.kvcache.blocks import as_tokens
from prefixwatch.router.policies.shared.routed_hashes import RoutedHashes
from prefixwatch.router.policies.shared.session_placement import STATISTICS_WINDOW_SECONDS, RequestRates
from prefixwatch.router.policy import Decision, Fleet, Memory, Needs, Policy, RouteRequest

_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class PrefixAwareOptions:
    chunk_characters: int = 128
    prefix_min_match_length: int = 0
    statistics_window_seconds: float = STATISTICS_WINDOW_SECONDS


class PrefixAware(Policy):
    """Whoever served the longest known part of the text, blind to load and without forgetting."""

    name = "prefixaware"
    source = "vllm-project/production-stack prefixaware"
    needs = Needs(text=True)
    reasons = ("deepest_match", "no_match_random", "no_statistics", "lowest_rate")
    Options = PrefixAwareOptions
    options: PrefixAwareOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        super().__init__(seed=seed, **options)
        self.served = RoutedHashes()
        self._rates = RequestRates(self.options.statistics_window_seconds)

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        path = text_path(request, self.options.chunk_characters)
        holders, matched_chunks = self._deepest(path, fleet)
        matched_characters = matched_chunks * self.options.chunk_characters
        if matched_characters < self.options.prefix_min_match_length:
            decision = self._rates.lowest(fleet.workers, fleet.now_seconds)
        else:
            reason = "deepest_match" if matched_chunks else "no_match_random"
            matched_tokens = matched_characters // _CHARACTERS_PER_TOKEN
            hit_blocks = min(matched_tokens // request.block_size, len(request.blocks))
            decision = Decision(self.rng.choice(holders), reason, hit_blocks)
        self.served.store(decision.worker, path)
        return decision

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self._rates.arrived(worker, now_seconds)

    def memory(self) -> Memory:
        return self.served.memory()

    def on_worker_removed(self, worker: str) -> None:
        self.served.forget(worker)
        self._rates.forget(worker)

    def _deepest(self, path: list[int], fleet: Fleet) -> tuple[list[str], int]:
        """The last set of candidates on this path, in the order listed, and its depth in chunks."""
        candidates = [worker.name for worker in fleet.workers]
        for depth, chunk in enumerate(path):
            known = self.served.holders(chunk)
            holders = [name for name in candidates if name in known]
            if not holders:
                return candidates, depth
            candidates = holders
        return candidates, len(path)


def text_path(request: RouteRequest, chunk_characters: int = 128) -> list[int]:
    """The chained hash of each chunk of the request's text, or of its tokens' bytes where it has no text."""
    text: str | bytes = request.text or as_tokens(request.tokens).tobytes()
    path, previous = [], xxh64_intdigest(request.tenant.encode("utf-8", "surrogatepass"))
    for start in range(0, len(text), chunk_characters):
        chunk = text[start : start + chunk_characters]
        raw = chunk.encode("utf-8", "surrogatepass") if isinstance(chunk, str) else chunk
        previous = xxh64_intdigest(raw + previous.to_bytes(8, "little"))
        path.append(previous)
    return path
