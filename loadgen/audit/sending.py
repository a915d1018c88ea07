"""Sends an audit's plan: what comes before each probe, a pause, the probe; within its rate and budget."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import gevent

from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.audit.identity import Identity, secrets_of
from prefixwatch.loadgen.audit.plan import AuditSettings, order_trials, prompt, shared_prefix, trials
from prefixwatch.loadgen.audit.samples import Arm, Order, Probe, Samples
from prefixwatch.loadgen.client.answer_reader import Exchange
from prefixwatch.loadgen.client.http_client import HttpClient, Target
from prefixwatch.loadgen.request_log.records import Outcome
from prefixwatch.loadgen.scenario.model import Timeouts
from prefixwatch.loadgen.scenario.secrets import without_keys

PATH = "/v1/chat/completions"
MOST_FAILURES = 5
"""One after the other: the target is refusing, and an audit must not make it worse."""
_CALIBRATING_LETTERS = 256
_TIMEOUTS = Timeouts(first_token_seconds=60, inter_token_seconds=30, total_seconds=120)


class Caches(Protocol):
    """What the engines say and do besides serving."""

    def hit_tokens(self) -> Mapping[str, int] | None:
        """Hit tokens by tier since the engines started; None where they can't be read."""

    def settled(self, before: Mapping[str, int], cached_tokens: int) -> Mapping[str, int] | None:
        """What the tiers served since `before`, once that adds up to `cached_tokens`; None if it doesn't."""

    def empty(self) -> None:
        """Empty the engines' own caches. Raises InputError where that can't be done."""


class _Ended(Exception):
    """The budget is used up, or the target refuses."""


@dataclass(slots=True)
class AuditRun:
    """One run of a plan; `send` returns what was measured, however it ended."""

    client: HttpClient
    model: str
    victim: Identity
    attacker: Identity
    settings: AuditSettings
    rng: random.Random
    caches: Caches | None = None
    progress: Callable[[int, int], None] = lambda done, of: None
    _samples: Samples = field(default_factory=Samples)
    _letters: int = 0
    _begun: float = 0.0
    _next: float = 0.0
    _failed_in_a_row: int = 0
    _last_failure: str = ""

    @classmethod
    def to(cls, url: str, **fields: Any) -> AuditRun:
        """Raises InputError for an address that can't be used."""
        return cls(HttpClient(Target.parse(url), _TIMEOUTS), **fields)

    def send(self) -> Samples:
        """Calibrate, then send all trials. Raises InputError if not even the first request is answered."""
        self._begun = self._next = time.monotonic()
        planned, batches = trials(self.settings, self.rng), order_trials(self.settings, self.rng)
        try:
            self._calibrate()
            for done, trial in enumerate(planned):
                self.progress(done, len(planned) + len(batches))
                self._probe(trial.arm, emptied=trial.emptied)
            for done, arm in enumerate(batches, len(planned)):
                self.progress(done, len(planned) + len(batches))
                self._batch(arm)
        except _Ended as ended:
            self._samples.stopped = str(ended)
        finally:
            self.client.close()
            self._samples.seconds = time.monotonic() - self._begun
        return self._samples

    def _calibrate(self) -> None:
        """Learn how many tokens a letter is."""
        self._letters = _CALIBRATING_LETTERS
        exchange = self._post(self.attacker, prompt(self._letters, self.rng))
        if exchange.outcome is not Outcome.COMPLETED:
            raise InputError(f"--target {self.client.target.authority}: the first request failed: {self._last_failure}")
        counted = exchange.usage.prompt_tokens
        if counted:
            self._letters = max(1, round(self.settings.prompt_tokens * _CALIBRATING_LETTERS / counted))
        else:
            self._letters = self.settings.prompt_tokens

    def _probe(self, arm: Arm, *, emptied: bool) -> None:
        probed = self._prepared(arm)
        if emptied and self.caches is not None:
            try:
                self.caches.empty()
            except InputError as error:
                raise _Ended(str(error)) from error
        before = self.caches.hit_tokens() if self.caches is not None else None
        exchange = self._post(self.attacker, probed, self.victim.salt if arm is Arm.FORGED else None)
        if exchange.outcome is not Outcome.COMPLETED:
            return
        usage, tiers = exchange.usage, None
        if self.caches is not None and before is not None and usage.cached_tokens is not None:
            tiers = self.caches.settled(before, usage.cached_tokens)
        self._samples.probes.append(
            Probe(arm, emptied, _seconds(exchange), usage.cached_tokens, usage.prompt_tokens, tiers)
        )

    def _batch(self, arm: Arm) -> None:
        """Send the candidate among cold prompts, all at once in random order, and note when it came."""
        texts = [self._prepared(arm), *(prompt(self._letters, self.rng) for _ in range(self.settings.order_batch - 1))]
        order = self.rng.sample(range(len(texts)), len(texts))
        for _ in texts:
            self._account(self.settings.prompt_tokens)
        gevent.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + len(texts) / self.settings.rate_per_second
        sent = [(place, gevent.spawn(self._exchange, self.attacker, texts[place])) for place in order]
        gevent.joinall([greenlet for _, greenlet in sent])
        answered = {place: greenlet.value for place, greenlet in sent}
        if any(each.outcome is not Outcome.COMPLETED for each in answered.values()):
            self._note(next(each for each in answered.values() if each.outcome is not Outcome.COMPLETED))
            return
        moments = {place: each.sent + _seconds(each) for place, each in answered.items()}
        rank = 1 + sum(moment < moments[0] for moment in moments.values())
        self._samples.orders.append(Order(arm, rank, len(texts)))

    def _prepared(self, arm: Arm) -> str:
        """Send what this arm's probe builds on, wait, and return the probe."""
        sender = self.attacker if arm is Arm.OWN else self.victim
        first = prompt(self._letters, self.rng)
        for _ in range(self.settings.victims):
            self._post(sender, first)
        gevent.sleep(self.settings.pause_seconds)
        shared = "" if arm is Arm.COLD else shared_prefix(first, self.settings.shared_part)
        return prompt(self._letters, self.rng, shared)

    def _post(self, sender: Identity, text: str, salt: str | None = None) -> Exchange:
        """One request, when rate and budget allow it. Raises _Ended when they don't any more."""
        self._account(self.settings.prompt_tokens)
        gevent.sleep(max(0.0, self._next - time.monotonic()))
        self._next = max(self._next, time.monotonic()) + 1 / self.settings.rate_per_second
        exchange = self._exchange(sender, text, salt)
        self._note(exchange)
        return exchange

    def _exchange(self, sender: Identity, text: str, salt: str | None = None) -> Exchange:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if salt or sender.salt:
            body["cache_salt"] = salt or sender.salt
        return self.client.post(self.client.head(PATH, sender.headers), json.dumps(body).encode())

    def _account(self, tokens: int) -> None:
        samples, settings = self._samples, self.settings
        for used, limit, option in (
            (samples.requests + 1, settings.max_requests, "--max-requests"),
            (samples.prompt_tokens + tokens, settings.max_tokens, "--max-tokens"),
            (time.monotonic() - self._begun, settings.max_seconds, "--max-seconds"),
        ):
            if used > limit:
                raise _Ended(f"{option} {limit:,.0f} is used up")
        samples.requests += 1
        samples.prompt_tokens += tokens

    def _note(self, exchange: Exchange) -> None:
        """Count a failure; correct the token count by what the answer reports. Raises _Ended after too many."""
        if exchange.outcome is Outcome.COMPLETED:
            self._failed_in_a_row = 0
            if exchange.usage.prompt_tokens is not None:
                self._samples.prompt_tokens += exchange.usage.prompt_tokens - self.settings.prompt_tokens
            return
        self._samples.failures += 1
        self._failed_in_a_row += 1
        error = without_keys(exchange.error, secrets_of(self.victim, self.attacker))
        self._last_failure = f"{exchange.outcome.value} ({error})"
        if self._failed_in_a_row == MOST_FAILURES:
            raise _Ended(f"{MOST_FAILURES} requests failed one after the other: {self._last_failure}")


def _seconds(exchange: Exchange) -> float:
    """To the first token; to the end where the only token has no text."""
    moment = exchange.first_token if exchange.first_token is not None else exchange.end
    assert moment is not None
    return moment - exchange.sent
