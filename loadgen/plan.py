"""What a run will send, decided before the first byte: every request with its time, prompt and identity."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

Answers = Literal["planned", "recorded", "generated"]

PRIME, WARM_UP, MEASURED, COOL_DOWN = "prime", "warm_up", "measured", "cool_down"


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

    `phase` is `prime` or `measured`; which of the latter are trimmed is told by the times at which they are due, which
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
    """What later turns carry as earlier answers: see `loadgen.prompt_keys.Sessions` and `loadgen.scenario.Replay`."""

    @property
    def loop(self) -> Literal["open", "closed"]:
        return "open" if self.concurrency is None else "closed"


def expected_hit_tokens(shared_tokens: int, prompt_tokens: int, block_size: int) -> int:
    """Prompt tokens that an infinite cache in blocks reuses: full blocks, and never the prompt's last token."""
    return max(0, min(shared_tokens, prompt_tokens - 1)) // block_size * block_size
