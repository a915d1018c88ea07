"""A request inside an engine model: what was asked, what has become of it, and the tokens it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prefixwatch.kvcache.blocks import Hashes


class RequestError(ValueError):
    """A request that this engine can never serve."""


@dataclass(slots=True)  # not frozen: that takes eight times as long to make
class SimRequest:
    """A request as the engine sees it: no text, only how long it is and which blocks it opens with.

    `blocks` are chain hashes, one a full block of the prompt; a trace may also give one for the partial last
    block, which is then reusable by an equal prompt.
    """

    id: str
    blocks: Sequence[int] | Hashes
    prompt_tokens: int
    max_tokens: int
    arrival_s: float = 0.0
    finish_reason: str = "length"
    """What the last token says; "stop" where `max_tokens` is where the model would have ended by itself."""
    arrived_with_kv: bool = False
    """The prompt was computed elsewhere and its KV moved here: only the last token is computed again."""
    received_from: int = 0
    received_to: int = 0
    """Blocks `received_from` … `received_to − 1` of the prompt were moved here, to be used behind cached ones."""
    may_strand: bool = False
    """Give it back (`EngineModel.take_stranded`) where fewer than `received_from` blocks are cached in its turn."""
    queued_s: float | None = None
    """Its place in the queue is that of a request of this time, if it waited for KV before it came; default: by
    arrival."""


class SequenceState:
    """A submitted request and what has become of it. Times are the driver's; None until they happen."""

    __slots__ = (
        "arrival_s",
        "arrived_with_kv",
        "blank_blocks",
        "blocks",
        "cached_tokens",
        "computed_tokens",
        "finish_reason",
        "first_token_s",
        "generated_tokens",
        "held_blocks",
        "hit_blocks",
        "id",
        "last_reason",
        "last_token_s",
        "max_tokens",
        "may_strand",
        "preemptions",
        "prompt_tokens",
        "queued_s",
        "received_from",
        "received_to",
        "scheduled_s",
    )

    def __init__(self, request: SimRequest, blocks: list[int], max_tokens: int, arrival_s: float) -> None:
        self.id = request.id
        self.blocks = blocks
        self.prompt_tokens = request.prompt_tokens
        self.max_tokens = max_tokens
        self.last_reason = request.finish_reason if max_tokens == request.max_tokens else "length"
        self.arrival_s = arrival_s
        self.arrived_with_kv = request.arrived_with_kv
        self.received_from, self.received_to = request.received_from, request.received_to
        self.may_strand = request.may_strand
        self.queued_s = arrival_s if request.queued_s is None else request.queued_s
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.finish_reason: str | None = None
        self.generated_tokens = 0
        self.computed_tokens = 0
        self.cached_tokens: int | None = None
        """Prompt tokens reused from the cache when first admitted."""
        self.hit_blocks: int | None = None
        """Leading blocks found in the cache when first admitted, before the last-token rule; received ones aside."""
        self.preemptions = 0
        self.held_blocks = 0  # leading `blocks` held in the pool
        self.blank_blocks = 0

    @property
    def generates_next(self) -> bool:
        """All but the token to come is computed: its next step generates one."""
        return self.generated_tokens > 0 and self.computed_tokens == self.prompt_tokens + self.generated_tokens - 1

    @property
    def longest_tokens(self) -> int:
        """Prompt and longest possible answer."""
        return self.prompt_tokens + self.max_tokens


class TokenOut(NamedTuple):
    """One generated token; `position` counts from 0, `finish_reason` is set with a request's last token."""

    request_id: str
    position: int
    finish_reason: str | None
    gap_s: float | None
    """Since the request's token before this one; None for its first."""
    sequence: SequenceState
