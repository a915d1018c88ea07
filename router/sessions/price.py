"""What it costs to move a session to another worker, and which way is cheaper. Pure functions.

A session is moved *soft* when its blocks are sent, and *hard* when its next turn computes them again:

    soft = queue + migrate + prefill(prompt, what the source holds)
    hard = queue           + prefill(prompt, what the destination holds)
    migrate = max(0, wait for the link + transfer − time until the session's next turn)

Each is the time to first token of the next turn: `Cost_miss = prefill + queue + migrate`. The transfer goes on while
the user thinks, so only what is left of it then counts. The cheaper way is taken; at equal prices the soft one, which
spares the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from prefixwatch.kvcache.transfer_link import KvLink

PrefillSeconds = Callable[[int], float | None]
"""Time to compute this number of uncached prompt tokens on an idle worker; None where it isn't known."""


class Kind(StrEnum):
    """How a session is moved."""

    SOFT = "soft"
    """Its blocks are sent."""
    HARD = "hard"
    """Its next turn computes them."""


class Why(StrEnum):
    """What decided how a session is moved."""

    BLOCKS_SOONER = "blocks_sooner"
    """Soft: sending takes no longer than computing."""
    PREFILL_SOONER = "prefill_sooner"
    """Hard: computing takes less time than sending."""
    HELD_THERE = "held_there"
    """Hard: the destination holds all that the source does, so nothing has to be sent."""
    SOURCE_DEAD = "source_dead"
    """Hard: the blocks are lost."""
    NO_CONNECTOR = "no_connector"
    """Hard: nothing carries blocks between these two workers."""
    PRICE_UNKNOWN = "price_unknown"
    """Hard: too few first tokens were seen to know what computing takes."""


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds until the first token, in its three parts."""

    prefill_seconds: float
    queue_seconds: float
    migrate_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """All three."""
        return self.prefill_seconds + self.queue_seconds + self.migrate_seconds


@dataclass(frozen=True, slots=True)
class Destination:
    """A worker that may take the session."""

    worker: str
    held_tokens: int
    """Of the session's prompt, cached there."""
    queue_seconds: float
    """Until it would begin with the prompt."""
    link: KvLink | None = None
    """From the source to it; None where nothing carries blocks."""
    link_wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a session goes and how; a price that can't be given is None."""

    worker: str
    kind: Kind
    why: Why
    soft: Price | None = None
    hard: Price | None = None

    @property
    def seconds(self) -> float | None:
        """The price of what was chosen."""
        price = self.soft if self.kind is Kind.SOFT else self.hard
        return None if price is None else price.seconds


def priced(
    prompt_tokens: int,
    source_tokens: int | None,
    destination: Destination,
    prefill_seconds: PrefillSeconds,
    return_seconds: float = 0.0,
) -> Choice:
    """Both prices at one destination, and the cheaper way. `source_tokens` are cached at the source; None: it is dead.

    `return_seconds`: when the next turn is expected.
    """
    held, queue = min(destination.held_tokens, prompt_tokens), destination.queue_seconds
    computing = prefill_seconds(prompt_tokens - held)
    hard = None if computing is None else Price(computing, queue)
    if source_tokens is None:
        return Choice(destination.worker, Kind.HARD, Why.SOURCE_DEAD, None, hard)
    sent = min(source_tokens, prompt_tokens)
    if sent <= held:
        return Choice(destination.worker, Kind.HARD, Why.HELD_THERE, None, hard)
    if destination.link is None:
        return Choice(destination.worker, Kind.HARD, Why.NO_CONNECTOR, None, hard)
    rest = prefill_seconds(prompt_tokens - sent)
    if hard is None or rest is None:
        return Choice(destination.worker, Kind.HARD, Why.PRICE_UNKNOWN, None, hard)
    transfer = destination.link_wait_seconds + destination.link.seconds(sent - held)
    soft = Price(rest, queue, max(0.0, transfer - return_seconds))
    if soft.seconds <= hard.seconds:
        return Choice(destination.worker, Kind.SOFT, Why.BLOCKS_SOONER, soft, hard)
    return Choice(destination.worker, Kind.HARD, Why.PREFILL_SOONER, soft, hard)


def cheapest(
    prompt_tokens: int,
    source_tokens: int | None,
    destinations: Sequence[Destination],
    prefill_seconds: PrefillSeconds,
    return_seconds: float = 0.0,
) -> Choice:
    """The destination with the lowest price, the first on equality; where no price is known, the one that holds most.

    Raises ValueError without a destination.
    """
    choices = [priced(prompt_tokens, source_tokens, each, prefill_seconds, return_seconds) for each in destinations]
    known = [choice for choice in choices if choice.seconds is not None]
    if known:
        return min(known, key=lambda choice: choice.seconds or 0.0)
    held = max(range(len(choices)), key=lambda k: destinations[k].held_tokens)
    return choices[held]
