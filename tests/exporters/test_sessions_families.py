"""Whether conversations find their cache again, and stay where it is."""

from __future__ import annotations

from prefixwatch.exporters.requests.config import RequestSettings
from prefixwatch.exporters.requests.request import Place
from tests.exporters.requests import done, figures, ledger_of, refused


def test_reuse_is_counted_from_a_sessions_second_request_on() -> None:
    turns = [done(session="s"), done(session="s", cached_tokens=896), done(cached_tokens=992), done(session="t")]
    shown = figures(ledger_of(turns))
    assert shown["session_prompt_tokens_total"] == {(): 1000}
    assert shown["session_hit_tokens_total"] == {(): 896}
    assert shown["sessions"] == {(): 2}
    assert "sticky_requests_total" not in shown, "nobody looked who held what"


def test_what_moving_costs_is_counted_apart_and_without_a_router_that_looks_no_request_is_sticky() -> None:
    """Spans name session, worker and cached tokens, not who held what: those that stayed must not pass for all."""
    turns = [
        done(session="s", worker=worker, cached_tokens=cached)
        for worker, cached in (("w0", 0), ("w0", 900), ("w1", 100), ("w1", 950))
    ]
    shown = figures(ledger_of(turns))
    assert (shown["session_prompt_tokens_total"], shown["session_hit_tokens_total"]) == ({(): 3000}, {(): 1950})
    assert (shown["session_moved_prompt_tokens_total"], shown["session_moved_hit_tokens_total"]) == (
        {(): 1000}, {(): 100},
    )  # fmt: skip
    assert "sticky_requests_total" not in shown
    assert "sticky_collisions_total" not in shown


def test_a_session_is_counted_in_the_window_only() -> None:
    ledger = ledger_of([done(session="s")])
    assert figures(ledger, 160.0)["sessions"] == {(): 1}
    assert figures(ledger, 161.0)["sessions"] == {(): 0}


def test_migrations_between_workers_and_between_nodes() -> None:
    nodes = {"w0": Place(node="a"), "w1": Place(node="a"), "w2": Place(node="b")}
    moves = [done(session="s", worker=worker) for worker in ("w0", "w1", "w2", "w2")]
    shown = figures(ledger_of(moves, places=nodes))
    assert shown["session_migrations_total"] == {("worker",): 2, ("node",): 1}
    assert figures(ledger_of(moves))["session_migrations_total"] == {("worker",): 2}  # nodes unknown: absent


def test_a_move_away_from_the_worker_that_holds_the_prefix_is_a_collision() -> None:
    def moved(**fields: object) -> dict[str, dict[tuple[str, ...], float]]:
        return figures(ledger_of([done(session="s", worker="w0"), done(session="s", worker="w1", **fields)]))

    assert moved(held_tokens=512, held_by="w0", predicted_tokens=0)["sticky_collisions_total"] == {(): 1}
    assert moved(held_tokens=512, held_by="w1", predicted_tokens=512)["sticky_collisions_total"] == {(): 0}
    assert moved(held_tokens=0)["sticky_collisions_total"] == {(): 0}  # evicted, or the worker is down
    assert "sticky_collisions_total" not in moved()  # nobody looked


def test_what_did_not_complete_moves_no_session() -> None:
    records = [done(session="s", worker="w0"), refused(session="s", worker="w1"), done(session="s", worker="w0")]
    assert figures(ledger_of(records))["session_migrations_total"] == {("worker",): 0}


def test_the_sessions_remembered_are_bounded_and_the_least_recent_goes_first() -> None:
    records = [done(session=name, held_tokens=0) for name in ("a", "b", "a", "c", "b", "a")]
    shown = figures(ledger_of(records, settings=RequestSettings(sessions=2)))
    assert shown["sessions"] == {(): 2}
    assert shown["sticky_requests_total"] == {(): 1}  # a's second; then b made room for c, and a for b
