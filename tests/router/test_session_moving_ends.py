"""Whatever happens to workers and sessions: each move ends with the session's next turn, and relief is rationed."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.router.policy import Worker
from prefixwatch.router.sessions.moving import Move, Trigger
from tests.router.test_session_moving import FAST, Fixture, request

SESSIONS, RELIEF_S = 8, 5.0
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["turn", "turn", "turn", "drain", "die", "join", "load"]),
        st.integers(0, SESSIONS - 1),
        st.floats(0, 4),
    ),
    max_size=60,
)


def happen(fixture: Fixture, kind: str, which: int, amount: float) -> None:
    """Something other than a turn; the last worker never leaves."""
    workers = fixture.workers
    name = sorted(workers)[which % len(workers)]
    if kind == "join":
        workers[f"joined-at-{fixture.now}"] = Worker(f"joined-at-{fixture.now}")
    elif kind == "load":
        workers[name].prefill_tokens = int(amount * 2000)
    elif len(workers) > 1:
        del workers[name]
        if kind == "drain":
            fixture.policy.leave(name, Trigger.DRAIN, list(workers.values()), fixture.now)
        fixture.policy.on_worker_removed(name)
        for held in fixture.around.held.values():
            held.pop(name, None)


def relief(moves: list[Move]) -> dict[str, list[float]]:
    """When sessions were taken from each worker for its load."""
    found = defaultdict[str, set[float]](set)
    for move in moves:
        if move.trigger is Trigger.OVERLOAD:
            found[move.stay.worker].add(move.at)
    return {worker: sorted(times) for worker, times in found.items()}


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.booleans(), st.booleans(), st.floats(0.01, 3))
def test_every_move_ends_with_the_next_turn_and_relief_is_rationed(
    events: list[tuple[str, int, float]], connected: bool, ahead: bool, overload: float
) -> None:
    fixture = Fixture(link=FAST if connected else None, overload_seconds=overload)
    fixture.around.sends_ahead = ahead
    fixture.learn()
    for number, (kind, which, passes) in enumerate(events):
        fixture.now += passes
        if kind != "turn":
            happen(fixture, kind, which, passes)
            continue
        decision = fixture.serve(request(f"s{which}", number=number))
        assert decision.worker in fixture.workers
        assert (decision.move is not None) == decision.reason.startswith("moved_")
    for times in relief(list(fixture.policy.moves)).values():
        assert all(later - earlier >= RELIEF_S for earlier, later in pairwise(times))

    for worker in fixture.workers.values():
        worker.prefill_tokens = 0
    for session in range(SESSIONS):
        fixture.serve(request(f"s{session}", number=1000 + session))
    for session in range(SESSIONS):
        assert fixture.serve(request(f"s{session}", number=2000 + session)).move is None
