"""What a run will send, decided before the first byte: every request with its time, prompt and identity."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, NamedTuple

Answers = Literal["planned", "recorded", "generated"]

PRIME, WARM_UP, MEASURED, COOL_DOWN = "prime", "warm_up", "measured", "cool_down"
TEMPLATE = "template"
BLOCK_CLASSES = ("system", "tools", "examples", "profile", "documents", "turns", "changing", TEMPLATE)
"""What a prompt's tokens are for: the shared prefix, tool schemas, few-shot examples, what is known of the user,
retrieved texts, what users and the assistant said, a changing field in front, the chat template's own words."""


class PromptPart(NamedTuple):
    """A stretch of a prompt of one block class."""

    block_class: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Trimming:
    """Which requests are sent and logged, but not graded: those due before or after these times."""

    measured_from_s: float = 0.0
    measured_until_s: float = inf

    def phase_at(self, scheduled_s: float) -> str:
        """Phase of a request that is due then."""
        if scheduled_s < self.measured_from_s:
            return WARM_UP
        return MEASURED if scheduled_s < self.measured_until_s else COOL_DOWN


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the plan.

    `phase` is `prime` or `measured`; which of the latter are trimmed depends on the times at which they are due, which
    a closed loop only knows when it sends them. `scheduled_s` counts from the start of its phase. `messages` is the
    OpenAI conversation, its texts already token-exact. `shared_tokens` is the part of `prompt_tokens` that an earlier
    request of the same namespace carried as its opening: what an infinite, fleet-wide cache could reuse, before
    rounding to blocks.
    """

    index: int
    phase: str
    scheduled_s: float
    tenant: str
    session: str
    turn: int
    group: str
    request_class: str
    messages: list[dict[str, Any]]
    max_tokens: int
    prompt_tokens: int
    shared_tokens: int
    salt: str | None = None
    user: str = ""
    """Whose session it is; empty where the plan has no users."""
    headers: dict[str, str] = field(default_factory=dict)
    model: str = ""
    """The model or LoRA adapter to ask for, its cache entries its own; empty: the run's model."""
    priority: int | None = None
    tools: list[dict[str, Any]] | None = None
    """The functions that it offers, as the OpenAI interface takes them."""
    tool_choice: Any = None
    """The field of that name; None: not sent."""
    template_tokens: int = 0
    """How much of the prompt's head is the chat template's own: the same in every run, so that caches may have it."""
    think_seconds: float = 0.0
    """Closed loop: wait after the session's answer before."""
    parts: tuple[PromptPart, ...] = ()
    """What the prompt is made of, from its first token to its last; empty where the plan doesn't know."""
    delay_seconds: float | None = None
    """Open loop: due this long after the answer to the turn before it, if that is later than its scheduled time."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All requests of one run of a scenario, in order of their time; `nonce` keeps runs' prompts apart."""

    scenario: str
    seed: int
    nonce: str
    model: str
    requests: list[PlannedRequest]
    concurrency: int | None = None
    """Users of a closed loop; None: open loop, every request at its scheduled time."""
    trimming: Trimming = Trimming()
    answers: Answers = "planned"
    """What later turns carry as earlier answers: see `Sessions` and `Replay` in `loadgen.scenario`."""

    @property
    def loop(self) -> Literal["open", "closed"]:
        return "open" if self.concurrency is None else "closed"
