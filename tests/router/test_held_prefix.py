"""Who held most of a prompt when it was placed: the upper end of the funnel held → routed → delivered."""

from __future__ import annotations

import numpy as np

from prefixwatch.kvcache.blocks import block_hashes
from prefixwatch.router.placement.cache_view import HistoryView
from prefixwatch.router.placement.dispatch import Dispatcher, Placement
from prefixwatch.router.placement.ledger import Ledger
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policy import NO_TOKENS, RouteRequest

BLOCK = 16


def request(tokens: int) -> RouteRequest:
    blocks = block_hashes(np.arange(tokens, dtype=np.uint32), BLOCK)
    return RouteRequest("r", tokens, NO_TOKENS, blocks, BLOCK)


def place(
    held: dict[str, int], tokens: int, *, down: frozenset[str] = frozenset(), tried: frozenset[str] = frozenset()
) -> Placement:
    """Round robin's first choice, a, of three workers that hold so many tokens of the prompt."""
    view, ledger = HistoryView(1000), Ledger()
    dispatcher = Dispatcher(make_policy("round_robin"), ledger, view, lambda name: name not in down)
    for name in ("a", "b", "c"):
        dispatcher.worker_up(name)
        if name in held:
            view.routed(request(held[name]), name)
    return dispatcher.place(request(tokens), tried)


def test_the_worker_that_holds_most_is_told_with_what_it_holds() -> None:
    placement = place({"a": 16, "b": 64, "c": 48}, 100)
    assert (placement.worker, placement.predicted_tokens) == ("a", 16)
    assert (placement.held_by, placement.held_tokens) == ("b", 64)


def test_the_chosen_one_is_told_if_it_holds_as_much() -> None:
    placement = place({"a": 64, "b": 64}, 100)
    assert (placement.held_by, placement.held_tokens) == ("a", 64)


def test_workers_that_can_not_take_the_request_hold_nothing_for_it() -> None:
    placement = place({"b": 64, "c": 48}, 100, down=frozenset({"b"}))
    assert (placement.held_by, placement.held_tokens) == ("c", 48)
    placement = place({"b": 64}, 100, tried=frozenset({"b"}))
    assert (placement.held_by, placement.held_tokens) == ("", 0)


def test_no_more_is_held_than_an_engine_could_reuse() -> None:
    """kvcache-ai/Mooncake#4164 (RT12): the last token is always computed, so 2 of 3 full blocks of 48 tokens."""
    assert place({"b": 48}, 48).held_tokens == 32
    assert place({"b": 40}, 40).held_tokens == 32
