"""What a routing policy is: a request and a view of the fleet in, a worker and the reasons out.

Policies know no HTTP, no clock and no metrics; the live router (`router.app`) and the virtual-time fleet
simulator (`stack.simulate`) drive the same objects. They are told what became of each request, because
several published policies need the first-token event and not only completion.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from kvcache.blocks import Hashes, Tokens

ViewSource = Literal["history", "events"]


@dataclass(frozen=True, slots=True, eq=False)
class RouteRequest:
    """A request as a policy sees it. Compares by identity, so policies can file by it: clients may use an id twice.

    `tokens` is the rendered prompt (empty where only block ids are known, as in some traces); `blocks` are its
    chain hashes, one a full block of `block_size` tokens, already rooted in the tenant's namespace. `text` is what the
    client wrote (the contents of a chat joined by newlines), filled only for policies that need it and empty where
    there is none, as in traces and prompts of token ids.
    """

    id: str
    prompt_tokens: int
    tokens: Tokens
    blocks: Hashes
    block_size: int
    max_output_tokens: int = 0
    model: str = ""
    tenant: str = ""
    session: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an engine last said of itself; a figure it doesn't give is None."""

    at_seconds: float
    running: int | None = None
    waiting: int | None = None
    kv_usage_ratio: float | None = None
    waiting_uncached_tokens: int | None = None
    """Prompt tokens still to be computed for the waiting requests."""
    generation_tokens_per_second: float | None = None
    kv_capacity_tokens: int | None = None
    """All the KV that the engine can hold; `kv_usage_ratio` of it is in use."""


@dataclass(slots=True)
class Worker:
    """One engine as this router knows it. The counters are this router's own ledger."""

    name: str
    in_flight: int = 0
    prefill_tokens: int = 0
    """Uncached prompt tokens sent and not yet answered by a first token."""
    served: int = 0
    """Requests ever placed here."""
    report: LoadReport | None = None
    backlog_seconds: float | None = None
    """True time until the engine has prefilled all it has; only the simulator can know (`Needs.truth`)."""


@dataclass(slots=True)
class Fleet:
    """The workers that may take this request (healthy, not just failed by it), and what they are believed to hold.

    `lookup` answers, for a request, the leading blocks that each worker holds (workers with none are left
    out). It is called at most once a decision, and only by policies that look.
    """

    workers: Sequence[Worker]
    lookup: Callable[[RouteRequest], Mapping[str, int]]
    now_seconds: float
    view: ViewSource = "history"
    """What the lookup knows from: the router's own routing history, or the engines' KV events."""
    prefill_seconds: Callable[[int, int], float] | None = None
    """True time to prefill (prompt tokens, cached tokens) on an idle engine; only the simulator can know."""

    def hit_blocks(self, request: RouteRequest) -> Mapping[str, int]:
        return self.lookup(request)


@dataclass(frozen=True, slots=True)
class Decision:
    """Where the request goes and why. `reason` is one of the policy's declared `reasons`."""

    worker: str
    reason: str
    hit_blocks: int = 0
    scores: Mapping[str, float] = field(default_factory=dict)
    predicted_queue_seconds: float | None = None
    """Wait before this request's prefill at the chosen worker, and the prefill itself, as the policy reckons; None
    where it doesn't reckon in time."""
    predicted_prefill_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """What a policy must be fed: anything not needed isn't computed for it."""

    tokens: bool = False
    cache_view: bool = False
    """Asks `Fleet.hit_blocks`; any writer of the view will do unless `events` is set."""
    events: bool = False
    """The view must be fed by the engines' KV events; the router's own history won't do."""
    engine_load: bool = False
    text: bool = False
    """Reads the prompt as plain text; where there is none, its tokens."""
    truth: bool = False
    """The lookup, `Worker.backlog_seconds` and `Fleet.prefill_seconds` must be the engines' true state."""


@dataclass(frozen=True, slots=True)
class NoOptions:
    """For policies without a knob."""


class NoWorkers(Exception):
    """There is no worker to choose from."""


class Policy(ABC):
    """A routing policy. Random ties come from `rng`, seeded by the caller, who reports the seed."""

    name: ClassVar[str]
    source: ClassVar[str]
    """The project, paper or release that the policy is taken from."""
    needs: ClassVar[Needs] = Needs()
    reasons: ClassVar[tuple[str, ...]]
    deterministic: ClassVar[bool] = False
    """The same calls always give the same answers, whatever the seed."""
    Options: ClassVar[type] = NoOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        known = [f.name for f in fields(self.Options)]
        for key in options:
            if key not in known:
                raise ValueError(f"policy {self.name} has no option '{key}'; it has {', '.join(known) or 'none'}")
        try:
            self.options: Any = msgspec.convert(options, self.Options, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"policy {self.name}: {error}") from error
        self.rng = random.Random(seed)

    @abstractmethod
    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        """The worker for this request. `fleet.workers` is never empty."""

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        """The request was sent to this worker (the choice, or another after a retry)."""

    def on_first_token(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        """The first token came back."""

    def on_end(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        """The request left this worker: completed, failed or abandoned."""

    def on_worker_removed(self, worker: str) -> None:
        """The worker left the fleet; nothing about it may survive in the policy."""


def least_loaded(workers: Sequence[Worker]) -> list[Worker]:
    """All workers with the fewest requests in flight."""
    fewest = min(worker.in_flight for worker in workers)
    return [worker for worker in workers if worker.in_flight == fewest]


NO_TOKENS: Tokens = np.empty(0, dtype=np.uint32)
