from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from prefixwatch.router.placement.ledger import Ledger, Ticket

WORKERS = st.sampled_from(["a", "b"])


def test_a_request_counts_from_admission_to_its_end() -> None:
    """Counted before it is sent, not when its stream opens: sgl-project/sglang#15473 (RT03)."""
    ledger = Ledger()
    worker = ledger.join("a")
    ticket = ledger.admit("a", 300, now=10.0)
    assert (worker.in_flight, worker.prefill_tokens, worker.served) == (1, 300, 1)
    ledger.first_token(ticket)
    assert (worker.in_flight, worker.prefill_tokens) == (1, 0)
    assert ledger.oldest_seconds(now=490.0) == 480.0
    ledger.end(ticket)
    assert (worker.in_flight, worker.prefill_tokens, worker.served) == (0, 0, 1)
    assert ledger.oldest_seconds(now=490.0) is None


def test_a_worker_that_rejoins_under_its_name_starts_at_zero() -> None:
    """inc, delete, add, inc, dec, dec ends at 0 and never below: llm-d/llm-d#1950 (RT23)."""
    ledger = Ledger()
    ledger.join("a")
    before = ledger.admit("a", 10, now=0.0)
    ledger.leave("a")
    worker = ledger.join("a")
    after = ledger.admit("a", 20, now=1.0)
    assert (worker.in_flight, worker.prefill_tokens) == (1, 20)
    assert ledger.in_flight() == {"a": 2}
    ledger.end(before)
    assert (worker.in_flight, worker.prefill_tokens) == (1, 20)
    ledger.end(after)
    assert (worker.in_flight, worker.prefill_tokens) == (0, 0)
    assert ledger.in_flight() == {"a": 0}


def test_a_long_request_is_kept_until_its_stream_ends() -> None:
    """No janitor drops live requests by age: llm-d/llm-d-router#2295 (RT24)."""
    ledger = Ledger()
    ledger.join("a")
    ledger.admit("a", 1, now=0.0)
    for now in range(0, 3600, 60):
        ledger.end(ledger.admit("a", 1, now=float(now)))
    assert ledger.in_flight() == {"a": 1}


class AnyOrder(RuleBasedStateMachine):
    """Every operation at any time, twice, or after its worker has left."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.open: set[Ticket] = set()
        self.prefilling: set[Ticket] = set()
        self.tokens: dict[Ticket, int] = {}

    @rule(name=WORKERS)
    def join(self, name: str) -> None:
        self.ledger.join(name)

    @rule(name=WORKERS)
    def leave(self, name: str) -> None:
        self.ledger.leave(name)

    @rule(target=tickets, name=WORKERS, tokens=st.integers(0, 1000))
    def admit(self, name: str, tokens: int) -> Ticket:
        self.ledger.join(name)
        ticket = self.ledger.admit(name, tokens, now=0.0)
        self.tokens[ticket] = tokens
        self.open.add(ticket)
        self.prefilling.add(ticket)
        return ticket

    @rule(ticket=tickets)
    def first_token(self, ticket: Ticket) -> None:
        self.ledger.first_token(ticket)
        self.prefilling.discard(ticket)

    @rule(ticket=tickets)
    def end(self, ticket: Ticket) -> None:
        self.ledger.end(ticket)
        self.open.discard(ticket)
        self.prefilling.discard(ticket)

    @invariant()
    def every_count_is_what_is_open(self) -> None:
        for worker in self.ledger.workers:
            mine = [ticket for ticket in self.open if ticket.worker is worker]
            assert worker.in_flight == len(mine)
            assert worker.prefill_tokens == sum(self.tokens[t] for t in mine if t in self.prefilling)
        assert sum(self.ledger.in_flight().values()) == len(self.open)

    def teardown(self) -> None:
        for ticket in self.open:
            self.ledger.end(ticket)
        assert not any(self.ledger.in_flight().values())
        assert all((worker.in_flight, worker.prefill_tokens) == (0, 0) for worker in self.ledger.workers)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
