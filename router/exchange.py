"""The facts of one request through the router, gathered while it runs and read once when it is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvcache.prediction import PredictionCause
from router.dispatch import Placement
from router.explain import scores_json
from router.isolation import Sent
from router.policy import Decision
from router.prompt import CHAT, Prompt
from router.sse import AnswerWatch


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
    session: str = ""
    request_class: str = ""
    trace_id: str = ""
    """Of the span that was begun, else of the client's `traceparent`."""
    explain: bool = False
    """The client asked for the decision's scores."""
    received_at: float | None = None
    prompt: Prompt | None = None
    placement: Placement | None = None
    """The last one tried."""
    sent: Sent | None = None
    """What its tenant had sent before; None where that isn't remembered."""
    retries: int = 0
    watch: AnswerWatch = field(default_factory=AnswerWatch)
    first_content_at: float | None = None
    last_chunk_at: float | None = None
    """Of a streamed answer."""
    ended_at: float | None = None
    outcome: Outcome = Outcome.FAILED
    """A failure until something else is known."""
    error: str = ""
    prediction_cause: PredictionCause | None = None
    """What became of the predicted hit tokens; None for requests that brought no answer."""

    def client_left(self) -> None:
        """The client is gone; one that leaves on `[DONE]`, before the stream's very end, has its answer."""
        complete = self.watch.done and self.watch.error is None
        self.outcome = Outcome.COMPLETED if complete else Outcome.DISCONNECTED

    @property
    def operation(self) -> str:
        """OpenTelemetry's name for what was asked."""
        return "chat" if self.path == CHAT else "text_completion"

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
        first, last, tokens = self.first_content_at, self.last_chunk_at, self.watch.output_tokens
        if first is None or last is None or tokens is None or tokens < 2:
            return None
        return (last - first) / (tokens - 1)

    def explanation(self, policy: str) -> dict[str, str]:
        """The response headers that tell the client how it was routed; what isn't known has none."""
        placement, decision_seconds = self.placement, self.decision_seconds
        if placement is None or decision_seconds is None:
            return {}
        headers = {
            "x-prefixwatch-worker": placement.worker,
            "x-prefixwatch-policy": policy,
            "x-prefixwatch-reason": placement.reason,
            "x-prefixwatch-decision-us": f"{decision_seconds * 1e6:.1f}",
            "x-prefixwatch-retries": str(self.retries),
        }
        if placement.predicted_tokens is not None:
            headers["x-prefixwatch-predicted-tokens"] = str(placement.predicted_tokens)
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


def _rounded(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.6g}"


def outcome_of_status(status: int) -> Outcome:
    """What an engine's HTTP status means for the request."""
    if status in (429, 503):
        return Outcome.REFUSED
    if status >= 500:
        return Outcome.FAILED
    return Outcome.REJECTED if status >= 400 else Outcome.COMPLETED
