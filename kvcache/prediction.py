"""Why an engine reused more or fewer prompt tokens than the router had expected.

Pure: the figures of one request in, one cause out. Who knows less passes less and gets a coarser cause, never a
wrong one.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from prefixwatch.kvcache.blocks import Hashes


class PredictionCause(StrEnum):
    """The outcome of a prediction. The first that applies, in this order."""

    NOT_REPORTED = "not_reported"
    """The engine didn't say how many tokens it reused."""
    NOT_PREDICTED = "not_predicted"
    """Nobody looked."""
    EXACT = "exact"
    WITHIN_BLOCK = "within_block"
    """Off by at most one block: the engine counts a partial block, or computes the last one again."""
    CLEARED = "cleared"
    """Less than predicted; the engine dropped its whole cache between decision and first token."""
    CONCURRENT_MISS = "concurrent_miss"
    """Less than predicted; the first block that was missed was credited to the worker while another request was still
    computing it there."""
    EVICTED_SINCE = "evicted_since"
    """Less than predicted; the engine removed blocks between decision and first token. Whether they were these isn't
    known: by the time it could be asked, this request has stored them again."""
    OVER_CREDITED = "over_credited"
    """Less than predicted for no reason known here: as a rule a history that remembers what the engine has evicted."""
    CONCURRENT_HIT = "concurrent_hit"
    """More than predicted; the first block beyond the prediction was being computed there by another request."""
    PARTLY_READABLE = "partly_readable"
    """More than predicted; the prompt has images or other content whose tokens only the engine knows, and all that
    could be predicted was there."""
    UNDER_CREDITED = "under_credited"
    """More than predicted for no reason known here: as a rule events that came late, or a history that forgot."""


def prediction_cause(
    predicted_tokens: int | None,
    delivered_tokens: int | None,
    *,
    block_size: int,
    computing_tokens: int = 0,
    cleared: bool = False,
    evicted: bool = False,
    readable_tokens: int | None = None,
) -> PredictionCause:
    """The outcome of a prediction, `delivered_tokens` being what the engine reports as reused.

    `computing_tokens`: how much of the prompt's opening requests without a first token were computing at that worker
    when the decision was made. `cleared`, `evicted`: the cache was dropped, blocks were removed, between the decision
    and the first token. `readable_tokens`: how much of the prompt's opening is known token by token, if not all of it.
    """
    if delivered_tokens is None:
        return PredictionCause.NOT_REPORTED
    if predicted_tokens is None:
        return PredictionCause.NOT_PREDICTED
    if abs(delivered_tokens - predicted_tokens) <= block_size:
        return PredictionCause.EXACT if delivered_tokens == predicted_tokens else PredictionCause.WITHIN_BLOCK
    concurrent = computing_tokens > min(delivered_tokens, predicted_tokens)
    if delivered_tokens > predicted_tokens:
        if concurrent:
            return PredictionCause.CONCURRENT_HIT
        cut = readable_tokens is not None and predicted_tokens >= readable_tokens // block_size * block_size
        return PredictionCause.PARTLY_READABLE if cut else PredictionCause.UNDER_CREDITED
    found = {
        PredictionCause.CLEARED: cleared,
        PredictionCause.CONCURRENT_MISS: concurrent,
        PredictionCause.EVICTED_SINCE: evicted,
    }
    return next((cause for cause, applies in found.items() if applies), PredictionCause.OVER_CREDITED)


def longest_common_blocks(blocks: Hashes, others: Iterable[Hashes]) -> int:
    """Leading blocks that this prompt shares with whichever of the others shares most. Chain hashes: equal at one
    position means equal before it, so each is found by bisection."""
    longest = 0
    for other in others:
        low, high = longest, min(len(blocks), len(other))
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] == other[middle - 1]:
                low = middle
            else:
                high = middle - 1
        longest = max(longest, low)
    return longest
