"""A policy under the degradation chain: which workers the wrapped policy may choose from while a class is pressed.

It is a policy itself, so the live router and the simulator use it alike, and a router without it pays nothing. It
learns the time of first tokens, predicts the next ones, and advances each class's state (`router.degradation.chain`) at
most once a second. Two of the steps are about placement and are taken here:

re-sticky   a request may only go where the opening of its prompt is cached, unless every such worker has more than 1.25
            times the mean number of requests (as `prefix_hash` has it)
warm pool   `warm_pool_workers` workers are reserved for misses: those that served the fewest hit tokens of late. A miss
            is a request whose uncached tokens would take any other worker more than `miss_ratio` of the objective; one
            that the pool holds moves out where that takes no longer than the objective. While its backlog exceeds the
            objective, the pool grows by a worker at a time, to `warm_pool_most_ratio` of them; it shrinks only when the
            step ends

The other two change what is sent, and are taken by the proxy (`router.serving.degraded`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prefixwatch.router.degradation.chain import STATES, Limits, Rule, Signals, State, Step, Transition, advance
from prefixwatch.router.degradation.config import DegradationConfig
from prefixwatch.router.degradation.prediction import Recent, TtftLine
from prefixwatch.router.policy import Decision, Fleet, Memory, Policy, RouteRequest, Worker

DEFAULT_CLASS = "default"
"""What requests of a class without an objective of its own are counted as: clients may send any name."""
_TICK_SECONDS = 1.0
_PREDICTION_SECONDS = 10.0
_LATENCY_SECONDS = 60.0
_HIT_SECONDS = 300.0
_OVERLOAD_FACTOR = 1.25
_WORKER_DECAY = 0.999
"""By which a worker's served hit tokens count less with every request placed."""


@dataclass(slots=True)
class ClassState:
    """One request class: where it is in the chain, and what is known of its newest requests."""

    limits: Limits
    state: State = field(default_factory=State)
    advanced_at: float | None = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STATES, 0.0))
    """Spent in each state."""
    transitions: dict[tuple[Step, Rule], int] = field(default_factory=dict)
    predicted: Recent = field(default_factory=lambda: Recent(_PREDICTION_SECONDS))
    ttft: Recent = field(default_factory=lambda: Recent(_LATENCY_SECONDS))
    hit_tokens: Recent = field(default_factory=lambda: Recent(_HIT_SECONDS, 4096))
    prompt_tokens: Recent = field(default_factory=lambda: Recent(_HIT_SECONDS, 4096))
    completed: Recent = field(default_factory=lambda: Recent(_HIT_SECONDS))
    smaller_completed: Recent = field(default_factory=lambda: Recent(_HIT_SECONDS))
    waits: Recent = field(default_factory=lambda: Recent(_LATENCY_SECONDS))

    def signals(self, now: float) -> Signals:
        """What the chain may know at `now`."""
        asked = sum(self.prompt_tokens.values(now))
        return Signals(
            predicted_ttft_seconds=self.predicted.quantile(now, 0.95),
            hit_ratio=sum(self.hit_tokens.values(now)) / asked if asked else None,
            ttft_p99_seconds=self.ttft.quantile(now, 0.99),
            completed_ratio=self.completed.mean(now),
            smaller_completed_ratio=self.smaller_completed.mean(now),
            async_wait_p99_seconds=self.waits.quantile(now, 0.99),
        )


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request without a first token."""

    worker: str
    own: ClassState
    uncached_tokens: int
    """Of its own prompt."""
    tokens: int
    """To be computed at the worker before its first one: those, and what was there before."""
    admitted_at: float


class DegradingPolicy(Policy):
    """The wrapped policy, restricted by the steps in effect."""

    name = "degrading"
    source = "prefixwatch"

    def __init__(self, inner: Policy, config: DegradationConfig) -> None:
        super().__init__()
        self.inner = inner
        self.config = config
        self.name, self.label = inner.name, inner.label
        self.needs = replace(inner.needs, cache_view=True)
        self.reasons = (*inner.reasons, *(f"{step}:{reason}" for step in _PLACING for reason in inner.reasons))
        self.classes = {DEFAULT_CLASS: ClassState(config.limits())}
        self.classes |= {name: ClassState(config.limits(seconds)) for name, seconds in config.classes.items()}
        self.pool: frozenset[str] = frozenset()
        """Workers reserved for misses; empty while no class has a warm pool."""
        self._pool_size = config.warm_pool_workers
        self._grown_at = 0.0
        self.line = TtftLine()
        self._chain = config.chain()
        self._pending: dict[RouteRequest, _Pending] = {}
        self._to_compute: dict[str, int] = {}
        """Prompt tokens placed at each worker whose first token hasn't come."""
        self._chosen: tuple[RouteRequest, int] | None = None
        self._served_hits: dict[str, float] = {}
        self.transitions: list[Transition] = []
        """The newest ones, for reports; at most 1,000."""

    def own(self, request_class: str) -> ClassState:
        """The state that a request of this class goes by."""
        return self.classes.get(request_class) or self.classes[DEFAULT_CLASS]

    def taken(self, request_class: str, step: Step) -> bool:
        """Whether this step is in effect for the class."""
        return step in self.own(request_class).state.steps

    def choose(self, request: RouteRequest, fleet: Fleet) -> Decision:
        now = fleet.now_seconds
        self.tick(now)
        depths = fleet.lookup(request)
        workers, step = self._allowed(request, fleet.workers, depths)
        decision = self.inner.choose(request, replace(fleet, workers=workers, lookup=lambda _: depths))
        hit = min(depths.get(decision.worker, 0) * request.block_size, request.prompt_tokens)
        self._chosen = request, hit
        return replace(decision, reason=f"{step}:{decision.reason}") if step is not None else decision

    def on_admit(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self.inner.on_admit(request, worker, now_seconds)
        own = self.own(request.request_class)
        hit = self._chosen[1] if self._chosen is not None and self._chosen[0] is request else 0
        uncached = request.prompt_tokens - hit
        tokens = self._to_compute[worker] = self._to_compute.get(worker, 0) + uncached
        self._pending[request] = _Pending(worker, own, uncached, tokens, now_seconds)
        predicted = self.line.seconds(tokens)
        if predicted is not None:
            own.predicted.add(now_seconds, predicted)
        own.hit_tokens.add(now_seconds, hit)
        own.prompt_tokens.add(now_seconds, request.prompt_tokens)
        for name in self._served_hits:
            self._served_hits[name] *= _WORKER_DECAY
        self._served_hits[worker] = self._served_hits.get(worker, 0.0) + hit

    def on_first_token(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self.inner.on_first_token(request, worker, now_seconds)
        pending = self._settled(request)
        if pending is not None:
            took = now_seconds - pending.admitted_at
            self.line.add(pending.tokens, took)
            pending.own.ttft.add(now_seconds, took)

    def on_end(self, request: RouteRequest, worker: str, now_seconds: float) -> None:
        self.inner.on_end(request, worker, now_seconds)
        self._settled(request)

    def on_close(self) -> None:
        self.inner.on_close()

    def memory(self) -> Memory:
        return self.inner.memory()

    def on_worker_removed(self, worker: str) -> None:
        self.inner.on_worker_removed(worker)
        self._served_hits.pop(worker, None)
        self._to_compute.pop(worker, None)
        self._pending = {request: own for request, own in self._pending.items() if own.worker != worker}
        self.pool -= {worker}

    def tick(self, now: float) -> None:
        """Advance the classes that are due, a second after the last time; also called where nobody asks."""
        for own in self.classes.values():
            if own.advanced_at is None:
                own.advanced_at = now
            elapsed = now - own.advanced_at
            if elapsed < _TICK_SECONDS:
                continue
            own.seconds[own.state.name] += elapsed
            own.advanced_at = now
            own.state, changes = advance(own.state, own.limits, self._chain, now, own.signals(now))
            for change in changes:
                key = change.step, change.rule
                own.transitions[key] = own.transitions.get(key, 0) + 1
                self.transitions = [*self.transitions[-999:], change]
        if not self._pool_wanted():
            self.pool, self._pool_size = frozenset(), self.config.warm_pool_workers
        elif now - self._grown_at >= self.config.dwell_seconds and (self.pool_utilization() or 0.0) > 1.0:
            self._pool_size, self._grown_at = self._pool_size + 1, now

    def is_miss(self, request: RouteRequest, depths: Mapping[str, int]) -> bool:
        """Whether no worker holds enough of the prompt: the rest would take more than `miss_ratio` of the objective."""
        per_token = self._seconds_per_token()
        held = max(depths.values(), default=0) * request.block_size
        limit = self.config.miss_ratio * self.own(request.request_class).limits.objective_seconds
        return per_token is not None and (request.prompt_tokens - held) * per_token > limit

    def pool_utilization(self) -> float | None:
        """What the reserved workers still have to compute, in time, over the time that they have for it: the objective.

        None without a warm pool, or before enough first tokens were seen.
        """
        per_token = self._seconds_per_token()
        if not self.pool or per_token is None:
            return None
        backlog = sum(self._to_compute.get(name, 0) for name in self.pool)
        return backlog * per_token / (len(self.pool) * self.config.ttft_seconds)

    def _seconds_per_token(self) -> float | None:
        empty, thousand = self.line.seconds(0), self.line.seconds(1000)
        return None if empty is None or thousand is None else (thousand - empty) / 1000

    def _settled(self, request: RouteRequest) -> _Pending | None:
        pending = self._pending.pop(request, None)
        if pending is not None:
            self._to_compute[pending.worker] -= pending.uncached_tokens
        return pending

    def _pool_wanted(self) -> bool:
        return any(Step.WARM_POOL in own.state.steps for own in self.classes.values())

    def _allowed(
        self, request: RouteRequest, workers: Sequence[Worker], depths: Mapping[str, int]
    ) -> tuple[Sequence[Worker], Step | None]:
        """The workers that the wrapped policy may choose from, and the step that restricts them."""
        step: Step | None = None
        if self._pool_wanted() and len(workers) > 1:
            workers, step = self._by_pool(request, workers, depths), Step.WARM_POOL
        if Step.RE_STICKY in self.own(request.request_class).state.steps:
            holders = list(self._opening_holders(request, workers, depths))
            if holders and len(holders) < len(workers):
                workers, step = holders, step or Step.RE_STICKY
        return workers, step

    def _by_pool(self, request: RouteRequest, workers: Sequence[Worker], depths: Mapping[str, int]) -> Sequence[Worker]:
        self._choose_pool([worker.name for worker in workers])
        per_token = self._seconds_per_token()
        if per_token is None:
            return workers
        limit = self.own(request.request_class).limits.objective_seconds
        inside = [worker for worker in workers if worker.name in self.pool]
        outside = [worker for worker in workers if worker.name not in self.pool]

        def seconds(at: Sequence[Worker]) -> float:
            held = max((depths.get(worker.name, 0) for worker in at), default=0) * request.block_size
            return max(0, request.prompt_tokens - held) * per_token

        known = seconds(inside) <= self.config.miss_ratio * limit
        return outside if seconds(outside) <= (limit if known else self.config.miss_ratio * limit) else inside

    def _choose_pool(self, present: Sequence[str]) -> None:
        """Keep the pool's workers that are present; up to its size, add those that served the fewest hit tokens."""
        most = max(1, int(self.config.warm_pool_most_ratio * len(present)))
        size = min(self._pool_size, most, len(present) - 1)
        kept = [name for name in present if name in self.pool]
        if len(kept) >= size:
            return
        order = sorted((self._served_hits.get(name, 0.0), k) for k, name in enumerate(present) if name not in self.pool)
        self.pool = frozenset([*kept, *(present[k] for _, k in order[: size - len(kept)])])

    def _opening_holders(
        self, request: RouteRequest, workers: Sequence[Worker], depths: Mapping[str, int]
    ) -> Iterator[Worker]:
        opening = min(max(1, self.config.opening_tokens // request.block_size), len(request.blocks))
        most = _OVERLOAD_FACTOR * (1 + sum(worker.in_flight for worker in workers)) / len(workers)
        for worker in workers:
            if opening and depths.get(worker.name, 0) >= opening and worker.in_flight <= max(most, 1.0):
                yield worker


_PLACING = (Step.RE_STICKY, Step.WARM_POOL)
