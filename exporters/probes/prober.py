"""The blackbox prober: sends each target a prompt that nobody sent before, and then the same again.

The first is a miss and the second a hit, by construction, on any OpenAI-compatible endpoint: from the two come TTFT
of misses and hits without load, the cold-prefill baseline, and what the endpoint reports as cached. No probe is sent
while requests wait at the target or the budget is spent: probes must not be the load that they measure.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import aiohttp
from prometheus_client.core import Metric

from prefixwatch.exporters.errors import ExporterError
from prefixwatch.exporters.http.credentials import Credentials
from prefixwatch.exporters.probes.config import Identity, IsolationConfig, ProbeConfig, ProbeTarget
from prefixwatch.exporters.probes.findings import SHARED_OPENING_TOKENS, Findings, Pair
from prefixwatch.exporters.probes.pages import TargetState, probe_document, probe_families
from prefixwatch.exporters.probes.plan import Spending, TargetPlan, TokenBudget, unique_prompt
from prefixwatch.exporters.probes.prefill_baseline import PrefillBaselines
from prefixwatch.exporters.probes.request import ProbeAnswer, first_model, probe_body, send_probe
from prefixwatch.kvcache.request_record import RequestRecord

_log = logging.getLogger("prefixwatch.exporter")

TENANT = "prefixwatch-probe"
_LONGEST_WAIT_SECONDS = 1.0
"""How soon a change of the schedule is seen."""

_Sender = tuple[dict[str, str], str | None]
"""Further headers, and the cache salt."""
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Prober:
    """All probed targets.

    `count` takes each probe with the name of this source; `waiting` returns the requests queued at a target and
    `hits_of` the hit tokens that its engine has counted, None where that is unknown. `rng` makes the prompts, which
    nobody may have sent before: by default the system's randomness.
    """

    name = "probes"

    def __init__(
        self,
        config: ProbeConfig,
        count: Callable[[RequestRecord, str], None],
        waiting: Callable[[str], float | None],
        credentials: Credentials,
        *,
        baselines: PrefillBaselines | None = None,
        block_size_of: Callable[[str], int | None] = lambda _: None,
        hits_of: Callable[[str], float | None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._count = count
        self._waiting = waiting
        self._credentials = credentials
        self._block_size_of = block_size_of
        self._hits_of = hits_of
        self._clock = clock
        self._rng = rng or random.SystemRandom()
        self._budget = TokenBudget(config.tokens_per_minute)
        self.baselines = baselines or PrefillBaselines()
        self.targets = {target.name: self._state(target) for target in config.targets}
        self._session: aiohttp.ClientSession | None = None
        self._loops: list[asyncio.Task[None]] = []

    def _state(self, target: ProbeTarget) -> TargetState:
        config = self._config
        plan = TargetPlan(
            config.prompt_tokens, config.interval_seconds, config.jitter_ratio, self._rng, now=self._clock()
        )
        findings = Findings(len(config.prompt_tokens))
        return TargetState(target, plan, TokenBudget(config.target_tokens_per_minute), findings)

    def start(self) -> None:
        """Probe from now on; needs a running event loop."""
        self._loops = [
            asyncio.create_task(self._loop(state), name=f"probe {name}") for name, state in self.targets.items()
        ]

    async def stop(self) -> None:
        """End all probes, also one that is under way."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        if self._session:
            await self._session.close()

    async def _loop(self, state: TargetState) -> None:
        while True:
            wait = state.plan.due_seconds - self._clock()
            if wait > 0:
                await asyncio.sleep(min(wait, _LONGEST_WAIT_SECONDS))
                continue
            try:
                await self.round(state)
            except Exception as error:  # a mistake of ours about one answer must not end this target's probes
                _log.exception("probe ended by a fault of the exporter", extra={"target": state.config.name})
                state.problem = f"{type(error).__name__}; the exporter's log has more"
                state.plan.done(self._clock(), failed=True)

    async def round(self, state: TargetState) -> None:
        """One round now, unless it must be skipped: the pair, and every so often a canary after it."""
        length = state.plan.length()
        words = state.plan.words(length)
        isolation = self._config.isolation
        canary = isolation if isolation and state.rounds % isolation.every_rounds == 0 else None
        cost = (3 if canary else 2) * (length + self._config.max_output_tokens)
        state.paused = self._why_not(state, cost)
        if state.paused:
            state.outcomes["skipped"] += 1
            state.plan.skip(self._clock())
            return
        state.rounds += 1
        state.findings.counted_hits.counted(self._hits_of(state.config.name), self._clock())
        spending = Spending(self._clock(), cost)  # before it is known, so that others don't spend it, too
        for budget in (state.budget, self._budget):
            budget.add(spending)
        try:
            answers = await self._ask(state, unique_prompt(self._rng, words), canary)
        except ExporterError as error:  # a secret's file is gone
            state.problem = str(error)
            state.plan.done(self._clock(), failed=True)
            return
        spending.tokens = sum((answer.prompt_tokens or length) + (answer.output_tokens or 0) for answer in answers)
        self._account(state, words, answers)

    def _why_not(self, state: TargetState, cost_tokens: int) -> str:
        waiting, most = self._waiting(state.config.name), self._config.max_waiting_requests
        if waiting is not None and waiting > most:
            return f"{waiting:g} requests are waiting, more than max_waiting_requests {most:g}"
        now = self._clock()
        for budget, name in ((state.budget, "target_tokens_per_minute"), (self._budget, "tokens_per_minute")):
            if not budget.affords(cost_tokens, now):
                return f"{name} is spent: {budget.spent(now)} tokens in the last minute, and {cost_tokens} more needed"
        return ""

    def _account(self, state: TargetState, words: int, answers: Sequence[ProbeAnswer]) -> None:
        for answer in answers:
            state.outcomes[answer.outcome] += 1
            if answer.prompt_tokens:
                state.plan.learn(words, answer.prompt_tokens)
        worst = next((answer for answer in answers if answer.outcome != "completed"), None)
        state.problem = worst.detail if worst else ""
        rejected = worst is not None and worst.outcome == "rejected"
        state.plan.done(self._clock(), rejected=rejected, failed=worst is not None and not rejected)

    async def _ask(self, state: TargetState, prompt: str, isolation: IsolationConfig | None) -> list[ProbeAnswer]:
        """The prompt twice as one tenant, and with a canary once more as another; ends at the first that fails."""
        model = await self._model(state)
        if model is None:
            return [ProbeAnswer("failed", f"{state.config.url}/v1/models lists no model: set its `model`")]
        state.model = model
        sender = self._sender(isolation.first if isolation else None)
        cold = await self._send(state, model, prompt, sender)
        state.spend(cold)
        if cold.outcome != "completed":
            self._record(state, cold, cold.cached_tokens)
            return [cold]
        repeat = await self._send(state, model, prompt, sender)
        state.spend(repeat, repeat=True)
        pair = Pair(cold, repeat)
        state.findings.counted_hits.reported(repeat.cached_tokens, self._clock())
        self._record(state, cold, pair.cold_tokens)
        self._record(state, repeat, repeat.cached_tokens)
        if repeat.outcome != "completed":
            return [cold, repeat]
        state.learn(pair, self.baselines.of(model))
        if isolation is None:
            return [cold, repeat]
        other = await self._send(state, model, prompt, self._sender(isolation.second))
        state.spend(other)
        if other.outcome == "completed":
            self._judge_canary(state, pair, other)
        return [cold, repeat, other]

    def _judge_canary(self, state: TargetState, pair: Pair, other: ProbeAnswer) -> None:
        """Certain: nobody but the first tenant ever sent this prompt."""
        if (pair.repeat.cached_tokens or 0) <= SHARED_OPENING_TOKENS:
            return  # the endpoint caches nothing, or doesn't tell: no hit could be seen
        own = SHARED_OPENING_TOKENS if state.config.api == "chat" else 0
        hit = (other.cached_tokens or 0) > own
        state.findings.add_canary(hit=hit)
        for result in ("hit", "miss"):  # a series that is there from the start, so that its first increase is seen
            state.canaries[result] += (result == "hit") == hit

    @staticmethod
    def _sender(identity: Identity | None) -> _Sender:
        """Headers and a fresh salt."""
        if identity is None:
            return {}, None
        headers = {name: value.get_secret_value() for name, value in identity.http_headers.items()}
        return headers, secrets.token_hex(16) if identity.salted else None

    async def _model(self, state: TargetState) -> str | None:
        """Whom to ask for; asked for each round, which also opens the connection before anything is timed."""
        target = state.config
        listed = await first_model(
            self._http(),
            target.url,
            headers=self._credentials.headers(target.client()),
            tls=self._credentials.tls(target.client()),
            timeout_seconds=self._config.timeout_seconds,
        )
        return target.model or listed

    async def _send(self, state: TargetState, model: str, prompt: str, sender: _Sender) -> ProbeAnswer:
        target, (headers, salt) = state.config, sender
        return await send_probe(
            self._http(),
            target.url + _PATHS[target.api],
            probe_body(target.api, model, prompt, self._config.max_output_tokens, salt),
            headers=self._credentials.headers(target.client()) | headers,
            tls=self._credentials.tls(target.client()),
            timeout_seconds=self._config.timeout_seconds,
        )

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                cookie_jar=aiohttp.DummyCookieJar(), headers={"User-Agent": "prefixwatch-prober"}
            )
        return self._session

    def _record(self, state: TargetState, answer: ProbeAnswer, cached_tokens: int | None) -> None:
        record = RequestRecord(
            ended_unix_seconds=time.time(),
            outcome=answer.outcome,
            worker=state.config.name,
            model=state.model,
            tenant=TENANT,
            request_class="probe",
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=cached_tokens,
            block_size=self._block_size_of(state.config.name),
            output_tokens=answer.output_tokens,
            ttft_seconds=answer.ttft_seconds,
            e2e_seconds=answer.e2e_seconds,
        )
        self._count(record, self.name)

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        return probe_families(self.targets.values(), self.baselines)

    def document(self, now_seconds: float) -> Mapping[str, Any]:
        return probe_document(self.targets.values(), self.baselines, self._clock())
