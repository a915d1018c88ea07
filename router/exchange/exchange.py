"""The facts of one request through the router, gathered while it runs and read once when it is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from prefixwatch.kvcache.isolation_findings import Finding, SentOpening
from prefixwatch.kvcache.prediction import PredictionCause
from prefixwatch.kvcache.tenant_memory import Sent
from prefixwatch.openai_api.answer import Answer
from prefixwatch.router.exchange.endpoints import HELPING, OPERATIONS
from prefixwatch.router.exchange.explain import scores_json
from prefixwatch.router.exchange.prompt import Prompt
from prefixwatch.router.placement.dispatch import Placement
from prefixwatch.router.policy import Decision, SessionMove

GROUP = "\0group "
"""In front of a trust group's name. No tenant's name holds a NUL."""


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """Turned away for load: 429, 503, or such an error inside a 200."""
    REJECTED = "rejected"
    """The request was at fault: any other 4xx."""
    FAILED = "failed"
    """An engine failed, before or after the first byte."""
    TIMED_OUT = "timed_out"
    """No answer, or no further token, in time."""
    DISCONNECTED = "disconnected"
    """The client left."""


@dataclass(slots=True)
class Exchange:
    """One request. Times are seconds of a monotonic clock; what didn't happen is None."""

    id: str
    path: str
    arrived_at: float
    tenant: str = ""
    trust_group: str = ""
    """Of tenants that may share; empty for a tenant by itself."""
    session: str = ""
    user: str = ""
    """Who the session belongs to, where the client says so."""
    request_class: str = ""
    trace_id: str = ""
    """Of the span that was begun, else of the client's `traceparent`."""
    explain: bool = False
    """The client asked for the decision's scores."""
    preference_applied: str = ""
    """What the degradation chain did that the client had accepted."""
    deferred: bool = False
    """Answered with a 202; the request itself comes later."""
    prefilled_by: str = ""
    """The worker that computed the prompt in advance."""
    split: str = ""
    """Where a split fleet computed the prompt, `remote:WORKER`; empty where nobody decided."""
    received_at: float | None = None
    body_bytes: int = 0
    """Held of its body."""
    prompt: Prompt | None = None
    placement: Placement | None = None
    """The last one tried."""
    expected_prefill_seconds: float | None = None
    """What computing its uncached tokens should take; None where that isn't known."""
    sent: Sent | None = None
    """What its tenant had sent before; None where that isn't remembered."""
    opening: SentOpening | None = None
    """What other tenants' requests are compared with; None where that isn't remembered."""
    finding: Finding | None = None
    """What its salt shows."""
    retries: int = 0
    answer: Answer = field(default_factory=Answer)
    first_content_at: float | None = None
    last_chunk_at: float | None = None
    """Of a streamed answer."""
    ended_at: float | None = None
    outcome: Outcome = Outcome.FAILED
    """A failure until something else is known."""
    error: str = ""
    prediction_cause: PredictionCause | None = None
    """Why the hit tokens were or weren't as predicted; None for requests without an answer."""

    @property
    def owner(self) -> str:
        """Who may share its blocks: the trust group, which no tenant is called like, or the tenant."""
        return f"{GROUP}{self.trust_group}" if self.trust_group else self.tenant

    @property
    def computed_elsewhere(self) -> bool:
        """A prefill worker of a split fleet had the prompt first: the time to first token holds its time, too."""
        return ":" in self.split

    def client_left(self) -> None:
        """The client is gone; one that leaves on `[DONE]`, before the stream's very end, has its answer."""
        complete = self.answer.done and self.answer.error is None
        self.outcome = Outcome.COMPLETED if complete else Outcome.DISCONNECTED

    @property
    def operation(self) -> str:
        """OpenTelemetry's name for what was asked."""
        return OPERATIONS.get(self.path, "text_completion")

    @property
    def asks_for_an_answer(self) -> bool:
        """Whether it counts among the requests for answers, unlike an embedding or a tokenisation."""
        return self.path not in HELPING

    @property
    def decision_seconds(self) -> float | None:
        """Tokenise, hash, look up and choose."""
        if self.prompt is None or self.placement is None:
            return None
        placed = self.placement.lookup_seconds + self.placement.choose_seconds
        return self.prompt.tokenize_seconds + self.prompt.hash_seconds + placed

    @property
    def ttft_seconds(self) -> float | None:
        """Time to first content, of a streamed answer."""
        return None if self.first_content_at is None else self.first_content_at - self.arrived_at

    @property
    def tpot_seconds(self) -> float | None:
        """Time per output token after the first, of a streamed answer of at least two."""
        first, last, tokens = self.first_content_at, self.last_chunk_at, self.answer.usage.output_tokens
        if first is None or last is None or tokens is None or tokens < 2:
            return None
        return (last - first) / (tokens - 1)

    def explanation(self, policy: str) -> dict[str, str]:
        """The response headers that tell the client how it was routed; what isn't known has none."""
        placement, decision_seconds = self.placement, self.decision_seconds
        if placement is None or decision_seconds is None:
            return {}
        headers = {"Preference-Applied": self.preference_applied} if self.preference_applied else {}
        headers |= {
            "x-prefixwatch-worker": placement.worker,
            "x-prefixwatch-policy": policy,
            "x-prefixwatch-reason": placement.reason,
            "x-prefixwatch-decision-us": f"{decision_seconds * 1e6:.1f}",
            "x-prefixwatch-retries": str(self.retries),
        }
        if self.split:
            headers["x-prefixwatch-prefill-side"] = self.split
        if placement.predicted_tokens is not None:
            headers["x-prefixwatch-predicted-tokens"] = str(placement.predicted_tokens)
        if self.expected_prefill_seconds is not None:
            headers["x-prefixwatch-prefill-s"] = _rounded(self.expected_prefill_seconds)
        if placement.decision.move is not None:
            headers.update(_move_headers(placement.decision.move))
        if self.explain:
            headers.update(_scores_headers(placement.decision))
        return headers


def _scores_headers(decision: Decision) -> dict[str, str]:
    headers = {
        "x-prefixwatch-predicted-queue-s": _rounded(decision.predicted_queue_seconds),
        "x-prefixwatch-predicted-prefill-s": _rounded(decision.predicted_prefill_seconds),
        "x-prefixwatch-scores": scores_json(decision),
    }
    return {name: value for name, value in headers.items() if value}


def _move_headers(move: SessionMove) -> dict[str, str]:
    headers = {
        "x-prefixwatch-move": move.kind,
        "x-prefixwatch-move-why": move.why,
        "x-prefixwatch-move-trigger": move.trigger,
        "x-prefixwatch-move-soft-s": _rounded(move.soft_seconds),
        "x-prefixwatch-move-hard-s": _rounded(move.hard_seconds),
        "x-prefixwatch-move-transfer-s": _rounded(move.transfer_seconds),
    }
    return {name: value for name, value in headers.items() if value}


def _rounded(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.6g}"
