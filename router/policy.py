"""What a routing policy is: a request and a view of the fleet in, a worker and the reasons out.

Policies know no HTTP, no clock and no metrics; the live router (`router.serving.app`) and the virtual-time fleet
simulator (`simulator.fleet`) drive the same objects. They learn how each request goes on, because
several published policies need the first-token event and not only completion.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from prefixwatch.kvcache.blocks import Hashes, Tokens
from prefixwatch.router.option_ranges import check_options
from prefixwatch.router.rates import LearnedRates

ViewSource = Literal["history", "events"]

MAX_OUTPUT_TOKENS = 10_000_000
"""A request's limit of output tokens counts as this at most: clients may send any number."""


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
    request_class: str = ""
    key: RouteRequest | None = None
    """What policies see instead, where requests are routed by a part of what they send; None: this."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_output_tokens <= MAX_OUTPUT_TOKENS:
            object.__setattr__(self, "max_output_tokens", min(max(self.max_output_tokens, 0), MAX_OUTPUT_TOKENS))


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an engine last reported of itself. A figure that it doesn't give, or that can't be true, is None."""

    at_seconds: float
    running: int | None = None
    waiting: int | None = None
    kv_usage_ratio: float | None = None
    waiting_uncached_tokens: int | None = None
    """Prompt tokens still to be computed for the waiting requests."""
    generation_tokens_per_second: float | None = None
    prefill_seconds_total: float | None = None
    """Of all prompts since the engine started, from their first step to their first token."""
    prefills_total: float | None = None
    """How many prompts that were."""
    kv_capacity_tokens: int | None = None
    """All the KV that the engine can hold; `kv_usage_ratio` of it is in use."""

    requests: int | None = field(init=False, default=None)
    """Running and waiting. Where the engine gives only one of them, at least that many."""

    def __post_init__(self) -> None:
        for name, (least, most) in _POSSIBLE.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:  # NaN fails both comparisons
                object.__setattr__(self, name, None)
        if self.running is not None or self.waiting is not None:
            object.__setattr__(self, "requests", (self.running or 0) + (self.waiting or 0))


_POSSIBLE: Mapping[str, tuple[float, float]] = {
    "running": (0, 1e6),
    "waiting": (0, 1e6),
    "kv_usage_ratio": (0, 1),
    "waiting_uncached_tokens": (0, 1e12),
    "generation_tokens_per_second": (0, 1e9),
    "prefill_seconds_total": (0, 1e12),
    "prefills_total": (0, 1e15),
    "kv_capacity_tokens": (1, 1e12),
}
"""The range of each figure of a `LoadReport`. Whatever an engine reports beyond it is an error of that engine."""


class Place(NamedTuple):
    """Where a worker is; empty: not said."""

    region: str = ""
    zone: str = ""
    node: str = ""
    gpu_group: str = ""
    """GPUs of a node that reach each other's memory quickly: by NVLink, or in one NUMA domain."""

    @property
    def group(self) -> tuple[str, str, str] | None:
        """What identifies the GPU group; None where it isn't said."""
        return (self.region, self.node, self.gpu_group) if self.gpu_group else None


NOWHERE = Place()


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
    rates: LearnedRates = field(default_factory=LearnedRates)
    """What its answers have shown of its hardware."""
    place: Place = NOWHERE

    @property
    def kv_usage_ratio(self) -> float | None:
        """The share of its KV memory that the engine reports as in use."""
        return self.report.kv_usage_ratio if self.report is not None else None


class LowerTiers(NamedTuple):
    """Blocks of a prompt right behind those in a worker's GPU, by where they are."""

    host_blocks: int = 0
    disk_blocks: int = 0
    shared_blocks: int = 0
    """In a store that all workers share."""


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
    lower_tiers: TierLookup | None = None
    """What follows, in lower tiers, the blocks that `lookup` found for each worker (workers with nothing are left out);
    None: there are none, or nobody says."""
    pull_seconds: Callable[[int], float] | None = None
    """Time to move the KV of this number of tokens to a worker while links are idle; None: nothing is moved, or nobody
    knows."""


TierLookup = Callable[[RouteRequest, Mapping[str, int]], Mapping[str, LowerTiers]]
"""What follows, for each worker, the leading blocks that it is believed to have."""


class ScoreArray(Mapping[str, float]):
    """Scores by worker in an array: a mapping that a fleet of thousands costs no dictionary for."""

    __slots__ = ("_names", "_position", "array")

    def __init__(self, names: Sequence[str], array: npt.NDArray[np.float64], position: Mapping[str, int]) -> None:
        """`position` has each name's position in both others."""
        self._names, self.array, self._position = names, array, position

    def __getitem__(self, name: str) -> float:
        return float(self.array[self._position[name]])

    def __contains__(self, name: object) -> bool:
        return name in self._position

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True)
class SessionMove:
    """Why the request's session has another worker than before: moved on purpose, at these prices (seconds)."""

    kind: str
    """`soft` (its blocks are sent) or `hard` (this request computes them)."""
    why: str
    trigger: str
    """`drain`, `death`, `overload` or `scale_in`."""
    soft_seconds: float | None
    """None where it couldn't be moved so, or a part of the price isn't known."""
    hard_seconds: float | None
    transfer_seconds: float | None
    """Of a soft move, from the decision to the expected end of the transfer; None for a hard one."""


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
    move: SessionMove | None = None
    """Set for the first request of a session after its move."""
    pulls: bool | None = None
    """Whether the worker should pull KV that it lacks from where it is; None: the policy leaves that to the worker."""

    @property
    def sends_blocks(self) -> bool:
        """Whether the first token may wait for blocks on their way: its time is then not the prefill's alone."""
        return self.move is not None and self.move.transfer_seconds is not None


@dataclass(frozen=True, slots=True)
class Needs:
    """What a policy must be fed: anything not needed isn't computed for it."""

    tokens: bool = False
    cache_view: bool = False
    """Calls `Fleet.lookup`; any writer of the view will do unless `events` is set."""
    events: bool = False
    """The view must be fed by the engines' KV events; the router's own history won't do."""
    engine_load: bool = False
    blocks_only: bool = False
    """Of the prompt, only its length and its blocks are read: the simulator doesn't make the token ids."""
    text: bool = False
    """Reads the prompt as plain text; where there is none, its tokens."""
    truth: bool = False
    """The lookup, `Worker.backlog_seconds` and `Fleet.prefill_seconds` must be the engines' true state."""


@dataclass(frozen=True, slots=True)
class NoOptions:
    """For policies without a knob."""


class NoWorkers(Exception):
    """There is no worker to choose from; the text says why, where a policy turned the request away."""


class Memory(NamedTuple):
    """The size of what a policy remembers of earlier prompts."""

    entries: int = 0
    bytes: int = 0
    """An estimate."""


class Policy(ABC):
    """A routing policy. Random ties come from `rng`, seeded by the caller, who reports the seed."""

    name: str
    source: ClassVar[str]
    """The project, paper or release that the policy is taken from."""
    needs: Needs = Needs()
    reasons: tuple[str, ...]
    deterministic: ClassVar[bool] = False
    """The same calls always give the same answers, whatever the seed."""
    Options: ClassVar[type] = NoOptions

    def __init__(self, *, seed: int = 0, **options: Any) -> None:
        self.label = self.name
        """What headers, metrics and results call it: its name, or the name of a variant."""
        known = [f.name for f in fields(self.Options)]
        for key in options:
            if key not in known:
                raise ValueError(f"policy {self.name} has no option '{key}'; it has {', '.join(known) or 'none'}")
        try:
            self.options: Any = msgspec.convert(options, self.Options, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"policy {self.name}: {error}") from error
        check_options(self.name, self.options, options)
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

    def on_close(self) -> None:
        """The router or the simulation ends: keep what should outlast it. Raises ValueError where that fails."""

    def memory(self) -> Memory:
        """The size of its own memory of prompts. It must be bounded."""
        return Memory()

    def on_worker_removed(self, worker: str) -> None:
        """The worker left the fleet; nothing about it may survive in the policy."""


def least_loaded(workers: Sequence[Worker]) -> list[Worker]:
    """All workers with the fewest requests in flight."""
    fewest = min(worker.in_flight for worker in workers)
    return [worker for worker in workers if worker.in_flight == fewest]


def known_or_highest(figures: list[float | None], otherwise: float = 0.0) -> list[float]:
    """The figures, with the highest known one for each that is unknown: an unknown load must not look like a low one.

    `otherwise` for all where none is known.
    """
    if None not in figures:
        return cast(list[float], figures)
    highest = max((figure for figure in figures if figure is not None), default=otherwise)
    return [highest if figure is None else figure for figure in figures]


def kv_usages(workers: Sequence[Worker]) -> list[float | None]:
    """The share of its KV memory that each worker reports as in use."""
    return [None if worker.report is None else worker.report.kv_usage_ratio for worker in workers]


def requests_at(workers: Sequence[Worker]) -> list[int]:
    """Requests at each worker: the ledger's, or what the engine reports as running and waiting if that is more.

    A worker that doesn't report counts as many as the one that reports most.
    """
    counts = known_or_highest([None if worker.report is None else worker.report.requests for worker in workers])
    return [w.in_flight if w.in_flight > count else int(count) for w, count in zip(workers, counts, strict=True)]


def deepest_hit(workers: Sequence[Worker], depths: Mapping[str, int]) -> int:
    """Leading blocks that the candidate with the most of them holds."""
    return max(depths.get(worker.name, 0) for worker in workers) if depths else 0


def hit_reason(depth: int, deepest: int, miss: str) -> str:
    """The reason for a choice that holds `depth` blocks where the best candidate holds `deepest`."""
    if not deepest:
        return miss
    return "hit_deepest" if depth == deepest else "hit_sacrificed"


def under_kv_pressure(workers: Sequence[Worker], overload: float, spread: float) -> bool:
    """Whether the highest reported KV usage exceeds `overload`, or the range of usages `spread`; 1.0 turns both off."""
    if overload >= 1.0 and spread >= 1.0:
        return False
    usages = [usage for usage in kv_usages(workers) if usage is not None]
    return bool(usages) and (max(usages) > overload or max(usages) - min(usages) > spread)


NO_TOKENS: Tokens = np.empty(0, dtype=np.uint32)
