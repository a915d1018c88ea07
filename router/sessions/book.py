"""Which worker serves each session, and what its last prompt was: what there is to move when a worker leaves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from prefixwatch.router.degradation.prediction import Recent
from prefixwatch.router.policy import RouteRequest

_GAP_SECONDS = 600.0
_SOON = 0.2


class SessionKey(NamedTuple):
    """A session's name is its tenant's own."""

    tenant: str
    session: str


@dataclass(frozen=True, slots=True, eq=False)
class Stay:
    """A session at its worker; `request` is its last one there."""

    key: SessionKey
    worker: str
    request: RouteRequest
    at: float
    """When that came."""


class SessionBook:
    """The last `most` sessions, and at most `most_blocks` block hashes of their prompts (8 bytes each)."""

    def __init__(self, most: int = 10_000, most_blocks: int = 4_000_000) -> None:
        self._most, self._most_blocks = most, most_blocks
        self._stays: OrderedDict[SessionKey, Stay] = OrderedDict()
        self._blocks = 0
        self._gaps = Recent(_GAP_SECONDS)

    def __len__(self) -> int:
        return len(self._stays)

    def came(self, request: RouteRequest, worker: str, now: float) -> None:
        """The session's newest request, at this worker; no effect without a session key."""
        if not request.session:
            return
        key = SessionKey(request.tenant, request.session)
        before = self._stays.get(key)
        if before is not None:
            self._gaps.add(now, now - before.at)
        self.put(Stay(key, worker, request, now))

    def put(self, stay: Stay) -> None:
        """The session is there, as its last request was."""
        key, request = stay.key, stay.request
        self.forget(key)
        self._stays[key] = stay
        self._blocks += len(request.blocks)
        while len(self._stays) > self._most or (self._blocks > self._most_blocks and len(self._stays) > 1):
            self.forget(next(iter(self._stays)))

    def return_seconds(self, now: float) -> float:
        """Time in which a fifth of the sessions come back after a request: most transfers have so long. 0 at first."""
        return self._gaps.quantile(now, _SOON) or 0.0

    def of(self, worker: str) -> Iterator[Stay]:
        """The sessions at a worker, the longest quiet first."""
        return (stay for stay in list(self._stays.values()) if stay.worker == worker)

    def get(self, key: SessionKey) -> Stay | None:
        return self._stays.get(key)

    def forget(self, key: SessionKey) -> None:
        """No effect where it isn't known."""
        stay = self._stays.pop(key, None)
        if stay is not None:
            self._blocks -= len(stay.request.blocks)
