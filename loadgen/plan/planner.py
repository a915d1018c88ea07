"""Scenario, alphabet, seed and nonce → the plan of a run. Nothing here knows a clock or a socket.

The same seed gives the same times, lengths, groups and tenants; the nonce changes only the words, from the
first one on, so that no run finds its prompts in a cache that another run filled.

Turn k of a session sends the whole conversation so far, with *planned* answers instead of the engine's:
replayed as planned, so every run sends the same bytes. The engine has its own answers in its cache, not these;
planned answers therefore never count as shared (kubernetes-sigs/inference-perf#649) until a later turn of the
session sends them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from prefixwatch.kvcache.blocks import Tokens
from prefixwatch.kvcache.reuse import SeenOpenings
from prefixwatch.loadgen.plan.parts import prompt_parts
from prefixwatch.loadgen.plan.prompts import Alphabet, Conversation, PromptWriter, Tools, Words
from prefixwatch.loadgen.plan.replay import ReplayWriter
from prefixwatch.loadgen.plan.request import Plan, PlannedRequest
from prefixwatch.loadgen.plan.sessions import USER_HEADER, DrawnRequest, Part, SessionDraws
from prefixwatch.loadgen.recordings.reader import read_recording
from prefixwatch.loadgen.recordings.request import Recording
from prefixwatch.loadgen.scenario.model import Scenario

WARM_NONCE = "warm"
_KEPT_TEXTS = 4096


Planned = tuple[PlannedRequest, Tokens]
"""A request and the token ids of its prompt."""


def make_plan(scenario: Scenario, writer: PromptWriter, *, seed: int, nonce: str, model: str) -> Plan:
    """Every request of a run, prime phase first, then by scheduled time. Raises PromptError, or DocumentError for a
    recording that can't be replayed."""
    planned = planned_prompts(scenario, writer, seed=seed, nonce=nonce)
    arrivals, replay = scenario.arrivals, scenario.replay
    return Plan(
        scenario.name,
        seed,
        _nonce(scenario, nonce),
        model,
        [request for request, _ in planned],
        concurrency=arrivals.concurrency if arrivals is not None else None,
        trimming=scenario.trimming,
        answers=scenario.sessions.answers if replay is None else replay.answers,
    )


def planned_prompts(
    scenario: Scenario, writer: PromptWriter, *, seed: int, nonce: str, texts: bool = True
) -> Iterator[Planned]:
    """`make_plan`'s requests one by one, with their token ids; without `texts`, only lengths and ids."""
    nonce = _nonce(scenario, nonce)
    shared = _Shared(by_tenant=scenario.isolation)
    prompts = _replayed if scenario.replay is not None else _drawn
    for index, (request, tokens) in enumerate(prompts(scenario, writer, seed, nonce, texts)):
        yield (
            replace(request, index=index, prompt_tokens=len(tokens), shared_tokens=shared.add(request, tokens)),
            tokens,
        )


def _nonce(scenario: Scenario, nonce: str) -> str:
    return WARM_NONCE if scenario.warm else nonce


def _drawn(scenario: Scenario, writer: PromptWriter, seed: int, nonce: str, texts: bool) -> Iterator[Planned]:
    words = _Texts(writer.alphabet, seed, nonce)
    draws = SessionDraws(scenario, seed)
    phases = {"prime": draws.primes() if scenario.prime else (), "measured": draws.measured()}
    verified: set[tuple[int, int]] = set()
    for phase, requests in phases.items():
        for drawn in requests:
            conversation = _conversation(drawn, words, writer)
            tools = [(name, words.words([part])) for name, part in drawn.tools]
            size = (len(conversation), len(tools))
            if size not in verified:  # one of each in which a template could differ
                verified.add(size)
                writer.verify(conversation, tools)
            request = replace(
                _request(drawn, phase, scenario),
                template_tokens=writer.template_tokens(conversation, tools),
                parts=prompt_parts(drawn, conversation, tools, writer),
            )
            yield (
                _with_texts(request, writer, conversation, tools) if texts else request,
                writer.tokens(conversation, tools),
            )


def _with_texts(
    request: PlannedRequest, writer: PromptWriter, conversation: Conversation, tools: Tools
) -> PlannedRequest:
    return replace(request, messages=writer.messages(conversation), tools=writer.tools(tools) or None)


def _replayed(scenario: Scenario, writer: PromptWriter, seed: int, nonce: str, texts: bool) -> Iterator[Planned]:
    assert scenario.replay is not None
    replays = ReplayWriter(writer, seed=seed, nonce=nonce, texts=texts)
    return replays.requests(
        recording_of(scenario), speed=scenario.replay.speed, until_s=scenario.duration_seconds, scenario=scenario
    )


def recording_of(scenario: Scenario) -> Recording:
    """The file that a scenario replays. Raises DocumentError."""
    assert scenario.replay is not None
    replay = scenario.replay
    recording = read_recording(
        replay.path, replay.format, replay.limit, time_unit=replay.time_unit, block_tokens=replay.block_tokens
    ).between(replay.from_seconds, replay.until_seconds)
    return recording if replay.rate_per_second is None else recording.at_rate(replay.rate_per_second)


class _Texts:
    """The words of each part of each conversation, by what they are for."""

    def __init__(self, alphabet: Alphabet, seed: int, nonce: str) -> None:
        self._alphabet = alphabet
        self._seed = seed
        self._nonce = nonce
        self._kept: dict[Part, Words] = {}

    def words(self, parts: Sequence[Part]) -> Words:
        """The texts of these parts, one after another."""
        return np.concatenate([self._of(part) for part in parts])

    def _of(self, part: Part) -> Words:
        words = self._kept.get(part)
        if words is None:
            if len(self._kept) >= _KEPT_TEXTS:
                self._kept.clear()
            words = self._kept[part] = self._alphabet.draw(part.tokens, self._nonce, self._seed, *part.key)
        return words


def _request(drawn: DrawnRequest, phase: str, scenario: Scenario) -> PlannedRequest:
    """All but its texts and what depends on the prompts before it."""
    tenant, model = drawn.tenant, drawn.model
    return PlannedRequest(
        index=0,
        phase=phase,
        scheduled_s=drawn.scheduled_s,
        tenant=tenant.name,
        session=drawn.session,
        turn=drawn.turn,
        group=drawn.group,
        request_class=tenant.request_class or scenario.request_class,
        messages=[],
        max_tokens=drawn.max_tokens,
        prompt_tokens=0,
        shared_tokens=0,
        salt=tenant.salt,
        user=drawn.user,
        headers={**tenant.headers, **({USER_HEADER: drawn.user} if drawn.user else {})},
        model=model.name if model is not None else "",
        priority=tenant.priority,
        tool_choice=scenario.tools.tool_choice if scenario.tools is not None and drawn.tools else None,
        think_seconds=drawn.think_seconds,
    )


def _conversation(drawn: DrawnRequest, texts: _Texts, writer: PromptWriter) -> Conversation:
    said = [(role, texts.words(parts)) for role, parts in drawn.said]
    return _opened_by(texts.words(drawn.opening), said, writer)


def _opened_by(prefix: Words, said: list[tuple[str, Words]], writer: PromptWriter) -> Conversation:
    """The conversation with its shared prefix as system message, or at the head of the first user message."""
    if writer.system_role:
        return [("system", prefix), *said]
    role, words = said[0]
    return [(role, np.concatenate([prefix, words])), *said[1:]]


class _Shared:
    """What each namespace has sent so far; `by_tenant` for tenants that must share nothing, salted or not."""

    def __init__(self, *, by_tenant: bool) -> None:
        self._by_tenant = by_tenant
        self._openings: dict[tuple[str | None, ...], SeenOpenings] = {}

    def add(self, request: PlannedRequest, tokens: Tokens) -> int:
        """Opening tokens that this request's namespace has sent before."""
        owner = request.tenant if self._by_tenant else None
        return self._openings.setdefault((request.salt, request.model, owner), SeenOpenings()).add(tokens)
