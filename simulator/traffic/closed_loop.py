"""The users of a closed loop in virtual time: each sends its next request when its last one has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from prefixwatch.simulator.traffic.trace import SimulatedRequest


class ClosedLoop:
    """Hands out requests by their number in the plan, a session at a time to each user."""

    def __init__(self, requests: Sequence[SimulatedRequest], users: int) -> None:
        sessions: dict[str, deque[int]] = {}
        for number, request in enumerate(requests):
            sessions.setdefault(request.session or request.id, deque()).append(number)
        self._requests = requests
        self._users = users
        self._waiting = deque(sessions.values())
        self._rest: dict[int, deque[int]] = {}
        """A request in flight, and what its session has left."""

    def first(self) -> Iterator[int]:
        """Each user's first request."""
        for _ in range(min(self._users, len(self._waiting))):
            number = self._next(deque())
            if number is not None:
                yield number

    def after(self, number: int) -> tuple[int, float] | None:
        """What the user whose request has ended sends next, and after how many seconds; None when all is sent."""
        following = self._next(self._rest.pop(number))
        return None if following is None else (following, self._requests[following].think_seconds)

    def _next(self, session: deque[int]) -> int | None:
        if not session:
            if not self._waiting:
                return None
            session = self._waiting.popleft()
        number = session.popleft()
        self._rest[number] = session
        return number
