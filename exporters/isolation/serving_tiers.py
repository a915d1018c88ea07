"""Which tier of a worker's cache served a reuse, by the engine's own counters of hit tokens.

A KV connector or a host cache that doesn't keep salts apart leaks behind a GPU cache that does, and is another thing to
repair. No engine says in its answer which tier served it. Its counters do where they stood still for one tier while the
request ran, or grew by less than the request reused.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prefixwatch.exporters.requests.request import Request

GPU, EXTERNAL, UNKNOWN = "gpu", "external", "unknown"
"""The GPU's own cache; any other: host memory, disk, another engine, a store behind a connector; nobody said."""
TIERS = (GPU, EXTERNAL, UNKNOWN)

_CLOCKS_DIFFER_SECONDS = 2.0
_LONGEST_WAIT_SECONDS = 120.0
_LOOKS = 64

TierOf = Callable[[Request], str | None]
"""None while it isn't known yet."""


def unknown_tier(request: Request) -> str | None:
    """Where no engine's counters are read."""
    return UNKNOWN


@dataclass(frozen=True, slots=True)
class _Look:
    began: float
    ended: float
    """Of the scrape, in Unix seconds."""
    gpu: float
    external: float
    """Hit tokens since the engine started."""


class ServingTiers:
    """The last pages of each worker. `worker_name` returns the one name of the worker that a router calls so."""

    def __init__(
        self, worker_name: Callable[[str], str] = lambda name: name, clock: Callable[[], float] = time.time
    ) -> None:
        self._worker_name, self._clock = worker_name, clock
        self._looks: defaultdict[str, deque[_Look]] = defaultdict(lambda: deque(maxlen=_LOOKS))

    def scraped(self, worker: str, began: float, ended: float, hit_tokens: Mapping[str, float]) -> None:
        """What a page read between these times says: hit tokens by tier. Without an outer tier, even one at 0, it
        doesn't tell tiers apart."""
        if GPU in hit_tokens and len(hit_tokens) > 1:
            external = sum(tokens for tier, tokens in hit_tokens.items() if tier != GPU)
            self._looks[worker].append(_Look(began, ended, hit_tokens[GPU], external))

    def forget(self, worker: str) -> None:
        """It isn't scraped any more."""
        self._looks.pop(worker, None)

    def of(self, request: Request) -> str | None:
        """The tier of what the request reused beyond its tenant's own; None before the scrape that will tell.

        An engine looks in its GPU cache first. So what the tenant owns comes before what it doesn't, and GPU before
        outer tiers.
        """
        record, cached = request.record, request.cached_tokens
        looks = self._looks.get(self._worker_name(record.worker))
        if not looks or cached is None or record.own_tokens is None or record.e2e_seconds is None:
            return UNKNOWN
        began = record.ended_unix_seconds - record.e2e_seconds - _CLOCKS_DIFFER_SECONDS
        ended = record.ended_unix_seconds + _CLOCKS_DIFFER_SECONDS
        before = next((look for look in reversed(looks) if look.ended <= began), None)
        if before is None:
            return UNKNOWN
        after = next((look for look in looks if look.began >= ended), None)
        if after is None:
            return None if self._clock() - record.ended_unix_seconds < _LONGEST_WAIT_SECONDS else UNKNOWN
        gpu, external = after.gpu - before.gpu, after.external - before.external
        if gpu < 0 or external < 0 or gpu + external < cached:
            return UNKNOWN  # restarted, or it counts otherwise
        if gpu <= record.own_tokens:
            return EXTERNAL
        return GPU if cached - external >= record.own_tokens + (record.block_size or 1) else UNKNOWN
