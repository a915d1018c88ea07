"""What Dynamo's router knows of the requests running on one worker: prefill tokens and KV blocks in use.

On admission a request's uncached tokens join the active prefill and its blocks the active blocks; blocks that several
requests share count once. The first token takes the prefill part away, the end the rest. Generated blocks aren't
counted. A request that never ends is forgotten by age.

With a prefill rate, active prefill decays. The oldest unfinished prefill is the anchor, and progress is its own pace:

    active = max(0, Σ tokens − tokens_anchor · elapsed / duration_anchor),   duration = tokens / rate

Progress may run past the anchor into later prefills; when the anchor is through, the next is timed from that moment.

Source: ai-dynamo/dynamo `lib/kv-router`, sequences.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvcache.index import BlockIndex
from router.policy import RouteRequest


@dataclass(slots=True)
class _Sequence:
    blocks: list[int]
    prefill_tokens: int
    admitted_at: float


@dataclass(slots=True)
class ActiveSequences:
    """One worker's requests in order of admission; `index` has the active blocks of all workers."""

    worker: str
    index: BlockIndex
    prefill_tokens_per_second: float | None = None
    _sequences: dict[RouteRequest, _Sequence] = field(default_factory=dict)
    _prefills: dict[RouteRequest, None] = field(default_factory=dict)
    _references: Counter[int] = field(default_factory=Counter)
    _prefill_tokens: int = 0
    _anchored_at: float = 0.0

    @property
    def requests(self) -> int:
        return len(self._sequences)

    @property
    def blocks(self) -> int:
        """Distinct blocks in use."""
        return len(self._references)

    def admit(self, request: RouteRequest, prefill_tokens: int, now: float) -> None:
        """A request starts here, with so many tokens to compute; one admitted before starts anew."""
        self.free(request, now)
        blocks = request.blocks.tolist()
        self.index.store(self.worker, [block for block in blocks if not self._references[block]])
        self._references.update(blocks)
        self._sequences[request] = _Sequence(blocks, prefill_tokens, now)
        if prefill_tokens:
            if not self._prefills:
                self._anchored_at = now
            self._prefills[request] = None
            self._prefill_tokens += prefill_tokens

    def prefilled(self, request: RouteRequest, now: float) -> None:
        """The first token came; no effect when it had come before."""
        if request in self._prefills:
            if next(iter(self._prefills)) == request:
                self._anchored_at = now
            del self._prefills[request]
            self._prefill_tokens -= self._sequences[request].prefill_tokens

    def free(self, request: RouteRequest, now: float) -> None:
        """The request is gone; no effect when it isn't known."""
        self.prefilled(request, now)
        sequence = self._sequences.pop(request, None)
        if sequence is None:
            return
        released = []
        for block in sequence.blocks:
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
                released.append(block)
        self.index.remove(self.worker, released)

    def expire(self, older_than_seconds: float, now: float) -> None:
        """Forget requests admitted longer ago than this."""
        while self._sequences:
            oldest = next(iter(self._sequences))
            if now - self._sequences[oldest].admitted_at <= older_than_seconds:
                return
            self.free(oldest, now)

    def prefill_tokens(self, now: float) -> float:
        """Tokens still to be prefilled."""
        if self.prefill_tokens_per_second is None or not self._prefills:
            return float(self._prefill_tokens)
        elapsed = max(0.0, now - self._anchored_at)
        return max(0.0, self._prefill_tokens - elapsed * self.prefill_tokens_per_second)
