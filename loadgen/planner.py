"""Scenario, alphabet, seed and nonce → the plan of a run. Nothing here knows a clock or a socket.

The same seed gives the same times, lengths, groups and tenants; the nonce changes only the words, from the
first one on, so that no run finds its prompts in a cache that another run filled.

Turn k of a session sends the whole conversation so far, with *planned* answers in the place of the engine's:
replayed as planned, so every run sends the same bytes. The engine has its own answers in its cache, not these;
planned answers therefore never count as shared (kubernetes-sigs/inference-perf#649) until a later turn of the
session sends them again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvcache.blocks import Tokens
from loadgen.arrivals import poisson_times
from loadgen.plan import Plan, PlannedRequest
from loadgen.prompts import Alphabet, Conversation, PromptWriter, Words
from loadgen.scenario import PrefixGroups, Scenario, Tenant, TokenRange

WARM_NONCE = "warm"
_NO_TENANT = Tenant(name="-")


@dataclass(frozen=True, slots=True)
class _Session:
    """One conversation, drawn from the schedule's randomness; its words come later."""

    number: int
    start: float
    tenant: Tenant
    group: int | None
    prefix_tokens: int
    user_tokens: list[int]
    answer_tokens: list[int]


def make_plan(scenario: Scenario, writer: PromptWriter, *, seed: int, nonce: str, model: str) -> Plan:
    """Every request of a run, prime phase first, then by scheduled time. Raises PromptError."""
    nonce = WARM_NONCE if scenario.warm else nonce
    text = _Texts(writer.alphabet, seed, nonce)
    rng = np.random.default_rng(seed)
    group_tokens = [_draw(scenario.groups.shared_tokens, rng) for _ in range(scenario.groups.count)]
    sessions = list(_sessions(scenario, group_tokens, rng))
    drafts = list(_prime_requests(scenario, group_tokens, text, writer)) if scenario.prime else []
    measured = [draft for session in sessions for draft in _turns(scenario, session, text, writer)]
    drafts += sorted(measured, key=lambda draft: draft.request.scheduled_s)
    for draft in _sample(drafts):
        writer.verify(draft.conversation)
    return Plan(scenario.name, seed, nonce, model, _with_prompts(drafts, writer))


def _sessions(scenario: Scenario, group_tokens: list[int], rng: np.random.Generator) -> Iterator[_Session]:
    arrivals, groups = scenario.arrivals, scenario.groups
    rate = arrivals.rate_per_second / scenario.sessions.mean_turns
    tenants = scenario.tenants or [_NO_TENANT]
    tenant_shares = _shares([tenant.weight for tenant in tenants])
    turn_counts = list(scenario.sessions.turns)
    turn_shares = _shares(list(scenario.sessions.turns.values()))
    group_shares = _group_shares(groups)
    for number, start in enumerate(poisson_times(rate, scenario.duration_seconds, rng)):
        tenant = tenants[rng.choice(len(tenants), p=tenant_shares)]
        group = int(rng.choice(groups.count, p=group_shares)) if groups.count else None
        turns = turn_counts[rng.choice(len(turn_counts), p=turn_shares)]
        yield _Session(
            number=number,
            start=start,
            tenant=tenant,
            group=group,
            prefix_tokens=_draw(groups.shared_tokens, rng) if group is None else group_tokens[group],
            user_tokens=[_draw(groups.unique_tokens, rng) for _ in range(turns)],
            answer_tokens=[_draw(groups.output_tokens, rng) for _ in range(turns)],
        )


def _group_shares(groups: PrefixGroups) -> list[float]:
    popularity = groups.popularity
    if popularity.weights is not None:
        return _shares(popularity.weights)
    exponent = popularity.zipf or 0.0
    return _shares([1.0 / rank**exponent for rank in range(1, groups.count + 1)]) if groups.count else []


def _shares(weights: list[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def _draw(length: TokenRange, rng: np.random.Generator) -> int:
    return int(rng.integers(length.min, length.max + 1))


@dataclass(frozen=True, slots=True)
class _Texts:
    """The words of each part of each conversation, by what they are for."""

    alphabet: Alphabet
    seed: int
    nonce: str

    def words(self, count: int, *part: str | int) -> Words:
        return self.alphabet.draw(count, self.nonce, self.seed, *part)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A request before its prompt is written out."""

    request: PlannedRequest
    conversation: Conversation


def _turns(scenario: Scenario, session: _Session, text: _Texts, writer: PromptWriter) -> Iterator[_Draft]:
    """The session's requests, each with all that was said before; those due after the end are left out."""
    part: tuple[str | int, ...] = ("session", session.number) if session.group is None else ("group", session.group)
    prefix = text.words(session.prefix_tokens, "prefix", *part)
    said: list[tuple[str, Words]] = []
    for turn, (user_tokens, answer_tokens) in enumerate(zip(session.user_tokens, session.answer_tokens, strict=True)):
        scheduled = session.start + turn * scenario.sessions.think_seconds
        if scheduled >= scenario.duration_seconds:
            return
        said.append(("user", text.words(user_tokens, "user", session.number, turn)))
        request = PlannedRequest(
            index=0,
            phase="measured",
            scheduled_s=scheduled,
            tenant=session.tenant.name,
            session=f"s{session.number}",
            turn=turn,
            group=_group_name(session.group),
            request_class=scenario.request_class,
            messages=[],
            max_tokens=answer_tokens,
            prompt_tokens=0,
            shared_tokens=0,
            salt=session.tenant.salt,
        )
        yield _Draft(request, _opened_by(prefix, said, writer))
        said.append(("assistant", text.words(answer_tokens, "answer", session.number, turn)))


def _prime_requests(
    scenario: Scenario, group_tokens: list[int], text: _Texts, writer: PromptWriter
) -> Iterator[_Draft]:
    """One short answer a group and tenant, to fill the caches before the measured phase."""
    for tenant in scenario.tenants or [_NO_TENANT]:
        for group, tokens in enumerate(group_tokens):
            user = text.words(scenario.groups.unique_tokens.min, "prime", tenant.name, group)
            request = PlannedRequest(
                index=0,
                phase="prime",
                scheduled_s=0.0,
                tenant=tenant.name,
                session=f"prime-{tenant.name}-{group}",
                turn=0,
                group=_group_name(group),
                request_class=scenario.request_class,
                messages=[],
                max_tokens=1,
                prompt_tokens=0,
                shared_tokens=0,
                salt=tenant.salt,
            )
            prefix = text.words(tokens, "prefix", "group", group)
            yield _Draft(request, _opened_by(prefix, [("user", user)], writer))


def _group_name(group: int | None) -> str:
    return "-" if group is None else f"g{group}"


def _opened_by(prefix: Words, said: list[tuple[str, Words]], writer: PromptWriter) -> Conversation:
    """The conversation with its shared prefix as system message, or at the head of the first user message."""
    if writer.system_role:
        return [("system", prefix), *said]
    role, words = said[0]
    return [(role, np.concatenate([prefix, words])), *said[1:]]


def _sample(drafts: list[_Draft]) -> list[_Draft]:
    """One draft of each number of messages: the shapes in which a template could differ."""
    return list({len(draft.conversation): draft for draft in drafts}.values())


def _with_prompts(drafts: list[_Draft], writer: PromptWriter) -> list[PlannedRequest]:
    openings: dict[str | None, SeenOpenings] = {}
    requests: list[PlannedRequest] = []
    for index, draft in enumerate(drafts):
        tokens = writer.tokens(draft.conversation)
        seen = openings.setdefault(draft.request.salt, SeenOpenings())
        requests.append(
            replace(
                draft.request,
                index=index,
                messages=writer.messages(draft.conversation),
                prompt_tokens=len(tokens),
                shared_tokens=seen.add(tokens),
            )
        )
    return requests


class SeenOpenings:
    """Prompts so far, kept in lexicographic order: the longest common opening is with a neighbour in it."""

    def __init__(self) -> None:
        self._prompts: list[bytes] = []

    def add(self, tokens: Tokens) -> int:
        """Length in tokens of the longest opening that an earlier prompt also has; then remember this one."""
        prompt = tokens.astype(">u4").tobytes()  # big-endian: bytes then sort as the tokens do
        place = bisect_left(self._prompts, prompt)
        shared = max((_common_tokens(prompt, near) for near in self._prompts[max(0, place - 1) : place + 1]), default=0)
        self._prompts.insert(place, prompt)
        return shared


def _common_tokens(a: bytes, b: bytes) -> int:
    length = min(len(a), len(b)) // 4
    different = np.frombuffer(a, dtype=">u4", count=length) != np.frombuffer(b, dtype=">u4", count=length)
    return int(different.argmax()) if different.any() else length
