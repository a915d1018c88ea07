"""What a run will send, decided before the first byte: every request with its time, prompt and identity."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the plan.

    `scheduled_s` counts from the start of its phase. `messages` is the OpenAI conversation, its texts already
    token-exact. `shared_tokens` is the part of `prompt_tokens` that an earlier request of the same namespace
    carried as its opening: what an infinite, fleet-wide cache could reuse, before rounding to blocks.
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


@dataclass(frozen=True, slots=True)
class Plan:
    """All requests of one run of a scenario, in order of their time; `nonce` keeps runs' prompts apart."""

    scenario: str
    seed: int
    nonce: str
    model: str
    requests: list[PlannedRequest]
