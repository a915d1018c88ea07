"""A policy whose sessions move: on drain, death and overload, each once, and with its prices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from prefixwatch.kvcache.transfer_link import KvLink
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policy import NO_TOKENS, Decision, Fleet, RouteRequest, Worker
from prefixwatch.router.sessions.book import SessionBook
from prefixwatch.router.sessions.moving import Move, MovingPolicy, Trigger

SIZE = 16
PER_TOKEN = 1e-3
FAST = KvLink(gbit_per_second=8, kv_bytes_per_token=1e4, latency_seconds=0.001)


def request(session: str, blocks: int = 10, number: int = 0) -> RouteRequest:
    chain = np.arange(blocks, dtype=np.uint64) + np.uint64(int.from_bytes(session.encode()[:4]) * 1000)
    return RouteRequest(f"{session}-{number}", blocks * SIZE, NO_TOKENS, chain, SIZE, session=session)


class Around:
    """The driver: every worker holds what was put there."""

    sends_ahead = True

    def __init__(self, link: KvLink | None = FAST) -> None:
        self.unable: set[str] = set()
        self.held: dict[str, dict[str, int]] = {}
        self.sent: list[Move] = []
        self._link = link

    def depths(self, request: RouteRequest) -> Mapping[str, int]:
        return self.held.get(request.session, {})

    def may_take(self, worker: str, request: RouteRequest) -> bool:
        return worker not in self.unable

    def link(self, source: str, destination: str) -> KvLink | None:
        return self._link

    def link_wait_seconds(self, source: str, now: float) -> float:
        return 0.0

    def carry(self, move: Move) -> None:
        self.sent.append(move)


class Fixture:
    def __init__(self, link: KvLink | None = FAST, **options: float) -> None:
        self.policy = MovingPolicy(make_policy("round_robin"), **options)  # type: ignore[arg-type]
        self.around = Around(link)
        self.policy.driver = self.around
        self.workers = {name: Worker(name) for name in "abc"}
        self.now = 0.0

    def fleet(self) -> Fleet:
        return Fleet(list(self.workers.values()), self.around.depths, self.now)

    def send(self, one: RouteRequest) -> Decision:
        decision = self.policy.choose(one, self.fleet())
        self.policy.on_admit(one, decision.worker, self.now)
        return decision

    def serve(self, one: RouteRequest) -> Decision:
        """Send, answer at 1 ms a token, and let the worker hold it."""
        decision = self.send(one)
        self.policy.on_first_token(one, decision.worker, self.now + PER_TOKEN * one.prompt_tokens)
        self.policy.on_end(one, decision.worker, self.now + 1.0)
        if one.session:
            self.around.held.setdefault(one.session, {})[decision.worker] = len(one.blocks)
        self.now += 1.0
        return decision

    def learn(self) -> None:
        for number in range(12):
            self.serve(request("", blocks=5 + number))


def test_each_session_of_a_drained_worker_moves_once_and_its_record_has_both_prices() -> None:
    fixture = Fixture()
    fixture.learn()
    for number in range(9):
        fixture.serve(request(f"s{number}"))
    at_a = [stay.key.session for stay in fixture.policy.book.of("a")]
    assert len(at_a) == 3

    moves = fixture.policy.leave("a", Trigger.DRAIN, [fixture.workers["b"], fixture.workers["c"]], fixture.now)

    assert [move.stay.key.session for move in moves] == at_a
    assert fixture.around.sent == moves
    assert {move.sent_tokens for move in moves} == {160}
    assert fixture.policy.counts == {("drain", "soft", "blocks_sooner"): 3}
    del fixture.workers["a"]
    fixture.policy.on_worker_removed("a")
    first = fixture.serve(request(at_a[0], number=1))
    assert (first.worker, first.reason) == (moves[0].choice.worker, "moved_soft")
    assert first.move is not None
    assert first.move.trigger == "drain"
    assert first.move.hard_seconds == pytest.approx(0.16, rel=0.05)
    assert first.move.soft_seconds is not None
    assert first.move.soft_seconds < 0.1
    assert first.move.transfer_seconds == pytest.approx(0.001 + 160 * 1e4 / 1e9)
    assert fixture.serve(request(at_a[0], number=2)).move is None


@pytest.mark.parametrize(("ahead", "kind"), [(True, "soft"), (False, "hard")])
def test_a_transfer_that_waits_for_the_session_counts_in_full(ahead: bool, kind: str) -> None:
    """0.2 s to send what takes 0.16 s to compute; sessions come back after seconds."""
    fixture = Fixture(link=KvLink(gbit_per_second=0.064, kv_bytes_per_token=1e4, latency_seconds=0.0))
    fixture.around.sends_ahead = ahead
    fixture.learn()
    for number in range(12):
        fixture.serve(request(f"s{number % 6}", number=number))
    moves = fixture.policy.leave("a", Trigger.DRAIN, [fixture.workers["b"]], fixture.now)
    assert {move.choice.kind for move in moves} == {kind}


def test_the_least_queued_workers_may_all_be_of_another_model() -> None:
    fixture = Fixture(link=None)
    fixture.serve(request("s"))
    others = {f"other-{k}": Worker(f"other-{k}") for k in range(8)}
    fixture.around.unable = set(others)
    fixture.workers["b"].prefill_tokens = 100
    fixture.learn()
    [move] = fixture.policy.leave("a", Trigger.DRAIN, [*others.values(), fixture.workers["b"]], fixture.now)
    assert move.choice.worker == "b"


def test_moves_of_one_drain_spread_over_those_that_stay() -> None:
    fixture = Fixture(link=None)
    fixture.learn()
    for number in range(30):
        fixture.serve(request(f"s{number}"))
    moves = fixture.policy.leave("a", Trigger.SCALE_IN, [fixture.workers["b"], fixture.workers["c"]], fixture.now)
    to = [move.choice.worker for move in moves]
    assert abs(to.count("b") - to.count("c")) <= 1
    assert {(move.choice.kind, move.choice.why) for move in moves} == {("hard", "no_connector")}
    assert fixture.around.sent == []


def test_a_dead_workers_sessions_move_when_they_come_back() -> None:
    fixture = Fixture()
    fixture.learn()
    for number in range(3):
        fixture.serve(request(f"s{number}"))
    [lost] = [stay.key.session for stay in fixture.policy.book.of("a")]
    fixture.around.held[lost].pop("a")
    del fixture.workers["a"]
    fixture.policy.on_worker_removed("a")
    assert fixture.policy.counts == {}

    decision = fixture.serve(request(lost, number=1))

    assert decision.move is not None
    assert (decision.move.kind, decision.move.why, decision.move.trigger) == ("hard", "source_dead", "death")
    assert fixture.policy.counts == {("death", "hard", "source_dead"): 1}


def test_an_overloaded_worker_gives_up_a_tenth_of_its_quiet_sessions_at_a_time() -> None:
    fixture = Fixture(overload_seconds=1.0)
    fixture.learn()
    for number in range(60):
        fixture.serve(request(f"s{number}"))
    before = sum(1 for _ in fixture.policy.book.of("a"))
    fixture.workers["a"].prefill_tokens = 5000  # 5 s

    fixture.send(request("other"))
    fixture.send(request("another"))

    assert sum(fixture.policy.counts.values()) == before // 10
    assert {move.trigger for move in fixture.policy.moves} == {Trigger.OVERLOAD}
    fixture.now += 5.0
    fixture.send(request("third"))
    assert sum(fixture.policy.counts.values()) > before // 10


def test_of_two_workers_the_one_with_the_longer_queue_is_relieved() -> None:
    fixture = Fixture(overload_seconds=1.0)
    del fixture.workers["c"]
    fixture.learn()
    for number in range(40):
        fixture.serve(request(f"s{number}"))
    fixture.workers["a"].prefill_tokens = 5000  # 5 s
    fixture.now += 1.0
    fixture.send(request("other"))
    assert {(move.trigger, move.choice.worker) for move in fixture.policy.moves} == {(Trigger.OVERLOAD, "b")}


def test_overload_is_looked_for_once_a_second_and_not_for_each_request() -> None:
    """At 200 workers a look takes longer than the choice of most policies."""
    fixture = Fixture(overload_seconds=1.0)
    fixture.workers = {f"w{k}": Worker(f"w{k}") for k in range(200)}
    fixture.learn()
    asked = 0
    seconds = fixture.policy.line.seconds

    def counted(tokens: int) -> float | None:
        nonlocal asked
        asked += 1
        return seconds(tokens)

    fixture.policy.line.seconds = counted  # type: ignore[method-assign]
    for k in range(100):
        fixture.now += 0.01
        fixture.send(request(f"s{k}"))
    assert 200 <= asked <= 2 * 2 * 200


@pytest.mark.parametrize(("ahead", "learnt"), [(True, 2), (False, 1)])
def test_the_first_token_of_a_turn_that_waits_for_its_blocks_teaches_nothing_of_prefills(
    ahead: bool, learnt: int
) -> None:
    fixture = Fixture()
    fixture.around.sends_ahead = ahead
    fixture.learn()
    for number in range(3):
        fixture.serve(request(f"s{number}"))
    [move] = fixture.policy.leave("a", Trigger.DRAIN, [fixture.workers["b"]], fixture.now)
    assert move.choice.kind == "soft"
    seen: list[int] = []
    fixture.policy.line.add = lambda tokens, seconds: seen.append(tokens)  # type: ignore[method-assign]
    for number in range(2):
        fixture.serve(request(move.stay.key.session, number=number))
    assert len(seen) == learnt


def test_where_nobody_stays_no_session_moves() -> None:
    fixture = Fixture()
    fixture.serve(request("s"))
    assert fixture.policy.leave("a", Trigger.DRAIN, [], fixture.now) == []


def test_the_book_keeps_the_newest_sessions_within_both_bounds() -> None:
    book = SessionBook(most=2, most_blocks=25)
    for number, session in enumerate("xyz"):
        book.came(request(session), "a", float(number))
    assert [stay.key.session for stay in book.of("a")] == ["y", "z"]
    book.came(request("long", blocks=40), "a", 9.0)
    assert [stay.key.session for stay in book.of("a")] == ["long"]
