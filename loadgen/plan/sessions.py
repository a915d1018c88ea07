"""Scenario and seed → sessions: who comes when, and of which texts the prompts are put together. No text yet.

A text is named by a key (`Part`); equal keys will get equal words. What existed first draws from the first stream of
random numbers, everything added later from streams of its own, so that a scenario which doesn't use it keeps its plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefixwatch.loadgen.recordings.reader import read_arrivals
from prefixwatch.loadgen.scenario.arrivals import Process, arrival_times, check_number, constant_rate
from prefixwatch.loadgen.scenario.lengths import shares
from prefixwatch.loadgen.scenario.model import Scenario
from prefixwatch.loadgen.scenario.prompts_section import ModelShare, Tenant

NO_TENANT = Tenant(name="-")
USER_HEADER = "x-user-id"
_REQUESTS_PER_USER = 50
_DETAILS, _FLASH, _LENGTHS, _MODELS, _FRONT, _PROFILES = 1, 2, 3, 4, 5, 6
"""Streams of random numbers beside the first."""

Key = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """`tokens` words of the text that this key names."""

    tokens: int
    key: Key


@dataclass(frozen=True, slots=True)
class DrawnRequest:
    """A request before its text is written."""

    scheduled_s: float
    session: str
    turn: int
    group: str
    tenant: Tenant
    model: ModelShare | None
    opening: tuple[Part, ...]
    """The system message."""
    said: tuple[tuple[str, tuple[Part, ...]], ...]
    """Role and text of each message after it."""
    max_tokens: int
    tools: tuple[tuple[str, Part], ...] = ()
    """Name and description of the functions that go into the request's own field."""
    think_seconds: float = 0.0
    user: str = ""


@dataclass(frozen=True, slots=True)
class _Session:
    number: int
    start: float
    tenant: Tenant
    group: str
    tools: tuple[Part, ...]
    opening: tuple[Part, ...]
    user_tokens: list[int]
    answer_tokens: list[int]


class SessionDraws:
    """All requests of one run of a scenario that isn't a replay."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        assert scenario.groups is not None
        assert scenario.arrivals is not None
        self._scenario = scenario
        self._groups = scenario.groups
        self._arrivals = scenario.arrivals
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._details = np.random.default_rng([seed, _DETAILS])
        self._layers = scenario.groups.layers
        self._layer_shares = [layer.popularity.shares(layer.count) for layer in self._layers]
        self._layer_tokens: dict[tuple[int, ...], int] = {}
        if scenario.groups.nesting is None:
            for layer in self._layers:  # one, whose lengths are drawn first
                self._layer_tokens = {(item,): layer.tokens.draw(self._rng) for item in range(layer.count)}
        self._models = _Models(scenario, seed)
        self._tool_parts = self._pool("tool", scenario.tools)
        self._shot_parts = self._pool("shot", scenario.few_shot)
        self._document_parts = self._pool("document", scenario.documents)
        self._document_shares = (
            scenario.documents.popularity.shares(scenario.documents.count) if scenario.documents else []
        )

    def measured(self) -> list[DrawnRequest]:
        """The measured phase; in an open loop by scheduled time, in a closed one session by session."""
        requests = [request for session in self._sessions() for request in self._turns(session)]
        if self._arrivals.closed:
            return requests
        return sorted([*requests, *self._flash_crowd()], key=lambda request: request.scheduled_s)

    def primes(self) -> Iterator[DrawnRequest]:
        """One short answer a group, tenant and model, to fill the caches before the measured phase."""
        for tenant in self._scenario.tenants or [NO_TENANT]:
            for model in self._models.all_of(tenant):
                for path in self._paths():
                    user = Part(self._groups.unique_tokens.shortest, ("prime", tenant.name, *path))
                    named = "" if model is None else f"-{model.name}"
                    yield DrawnRequest(
                        scheduled_s=0.0,
                        session=f"prime-{tenant.name}-{'.'.join(map(str, path))}{named}",
                        turn=0,
                        group=_group_name(path),
                        tenant=tenant,
                        model=model,
                        opening=(*self._as_text(self._tool_parts), *self._prefix(path)),
                        said=(("user", (user,)),),
                        max_tokens=1,
                        tools=self._as_field(self._tool_parts),
                    )

    def _sessions(self) -> Iterator[_Session]:
        scenario, groups, rng = self._scenario, self._groups, self._rng
        tenants = scenario.tenants or [NO_TENANT]
        tenant_shares = shares([tenant.weight for tenant in tenants])
        turn_counts = list(scenario.sessions.turns)
        turn_shares = shares(list(scenario.sessions.turns.values()))
        later = scenario.sessions.later_tokens or groups.unique_tokens
        planned = 0
        for number, start in enumerate(self._starts()):
            tenant = tenants[rng.choice(len(tenants), p=tenant_shares)]
            path = tuple(int(rng.choice(len(own), p=own)) for own in self._layer_shares)
            turns = turn_counts[rng.choice(len(turn_counts), p=turn_shares)]
            if self._arrivals.closed:
                if planned >= self._closed_requests:
                    return
                turns = min(turns, self._closed_requests - planned)
            planned += turns
            prefix = self._prefix(path) if path else (self._own_prefix(number),)
            tools = self._tools()
            yield _Session(
                number=number,
                start=start,
                tenant=tenant,
                group=_group_name(path),
                tools=tools,
                opening=(*self._opening(start, prefix), *self._profile(number)),
                user_tokens=[(later if turn else groups.unique_tokens).draw(rng) for turn in range(turns)],
                answer_tokens=[groups.output_tokens.draw(rng) for _ in range(turns)],
            )

    @property
    def _closed_requests(self) -> int:
        assert self._arrivals.concurrency is not None
        requests = self._arrivals.requests or _REQUESTS_PER_USER * self._arrivals.concurrency
        check_number(max(requests, self._arrivals.concurrency))
        return requests

    def _starts(self) -> Sequence[float]:
        """When sessions start, seconds."""
        arrivals, duration = self._arrivals, self._scenario.duration_seconds
        if arrivals.kind == "closed":
            return [0.0] * self._closed_requests
        if arrivals.kind == "trace":
            assert arrivals.file is not None
            times = read_arrivals(arrivals.file, arrivals.format, arrivals.limit)
            return [time / arrivals.speed for time in times if time / arrivals.speed < duration]
        curve = arrivals.curve(duration, 1 / self._scenario.sessions.mean_requests)
        process: Process = arrivals.kind
        return arrival_times(process, curve, self._rng, burstiness=arrivals.burstiness)

    def _turns(self, session: _Session) -> Iterator[DrawnRequest]:
        """The session's requests, each with all that was said before; those due after the end are left out."""
        details, keys = self._details, self._scenario.sessions
        turns = len(session.user_tokens)
        waits = [0.0] + [keys.think_seconds.draw(details) for _ in range(turns - 1)]
        forks_after = self._chosen_turn(turns, keys.forks.share) if keys.forks else None
        hands_over_after = self._chosen_turn(turns, keys.handover_share) if keys.handover_share else None
        branches = keys.forks.branches if keys.forks and forks_after is not None else 1
        retrieved = [self._retrieved() for _ in range(turns)]
        for branch in range(branches):
            said: list[tuple[str, tuple[Part, ...]]] = []
            scheduled = session.start
            for turn in range(turns):
                scheduled += waits[turn]
                if not self._arrivals.closed and scheduled >= self._scenario.duration_seconds:
                    break
                own: Key = (branch,) if branch and forks_after is not None and turn > forks_after else ()
                user = Part(session.user_tokens[turn], ("user", session.number, turn, *own))
                said.append(("user", (*retrieved[turn], user)))
                if not branch or own:
                    yield DrawnRequest(
                        scheduled_s=scheduled,
                        session=_session_name(session.number, branch, turn, hands_over_after),
                        turn=turn,
                        group=session.group,
                        tenant=session.tenant,
                        model=self._models.of(session.number, session.tenant),
                        opening=self._with_front(session, turn, branch),
                        said=tuple(said),
                        max_tokens=session.answer_tokens[turn],
                        tools=self._as_field(session.tools),
                        think_seconds=waits[turn],
                        user=self._user(session.number),
                    )
                answer = Part(session.answer_tokens[turn], ("answer", session.number, turn, *own))
                said.append(("assistant", (answer,)))

    def _chosen_turn(self, turns: int, share: float) -> int | None:
        """After which turn something happens to a session; None where it doesn't."""
        if turns < 2 or self._details.random() >= share:
            return None
        return int(self._details.integers(0, turns - 1))

    def _user(self, number: int) -> str:
        """Users take turns; without a number of them, each session that can move has one of its own."""
        keys = self._scenario.sessions
        if keys.users is not None:
            return f"u{number % keys.users}"
        return f"u{number}" if keys.handover_share else ""

    def _profile(self, number: int) -> tuple[Part, ...]:
        """What the system message says of the session's user."""
        keys = self._scenario.sessions
        if keys.users is None or keys.profile_tokens is None:
            return ()
        user = number % keys.users
        rng = np.random.default_rng([self._seed, _PROFILES, user])
        return (Part(keys.profile_tokens.draw(rng), ("profile", user)),)

    def _tools(self) -> tuple[Part, ...]:
        """All tools, in the order in which a session has them."""
        tools, details = self._tool_parts, self._details
        if self._scenario.tools is not None and details.random() < self._scenario.tools.shuffled_share:
            tools = [tools[k] for k in details.permutation(len(tools))]
        return tuple(tools)

    def _as_text(self, tools: Sequence[Part]) -> Sequence[Part]:
        """The tools that are part of the system message."""
        return () if self._scenario.tools is not None and self._scenario.tools.sent_as == "field" else tools

    def _as_field(self, tools: Sequence[Part]) -> tuple[tuple[str, Part], ...]:
        """Those that go into the request's field; a tool keeps its name wherever it stands."""
        return () if self._as_text(tools) else tuple((f"tool_{tool.key[1]}", tool) for tool in tools)

    def _opening(self, start: float, prefix: tuple[Part, ...]) -> tuple[Part, ...]:
        """Prefix and examples."""
        scenario, details = self._scenario, self._details
        if scenario.rollout is not None and details.random() < self._rolled_out(start):
            prefix = _new_version(prefix, scenario.rollout.keeps_tokens)
        return (*prefix, *self._shots())

    def _rolled_out(self, start: float) -> float:
        """Share of the sessions that start now and get the new version."""
        rollout = self._scenario.rollout
        assert rollout is not None
        if start < rollout.at_seconds:
            return 0.0
        return min(1.0, (start - rollout.at_seconds) / rollout.over_seconds) if rollout.over_seconds else 1.0

    def _shots(self) -> list[Part]:
        few_shot, details = self._scenario.few_shot, self._details
        if few_shot is None:
            return []
        chosen = details.choice(few_shot.pool, few_shot.shots, replace=False)
        if details.random() >= few_shot.shuffled_share:
            chosen = np.sort(chosen)
        return [self._shot_parts[k] for k in chosen]

    def _retrieved(self) -> list[Part]:
        documents = self._scenario.documents
        if documents is None:
            return []
        chosen = self._details.choice(documents.count, documents.per_turn, replace=False, p=self._document_shares)
        return [self._document_parts[k] for k in (np.sort(chosen) if documents.order == "fixed" else chosen)]

    def _with_front(self, session: _Session, turn: int, branch: int) -> tuple[Part, ...]:
        """The whole system message of a request."""
        front = self._scenario.dynamic_front
        opening = (*self._as_text(session.tools), *session.opening)
        if front is None or np.random.default_rng([self._seed, _FRONT, session.number]).random() >= front.share:
            return opening
        changes: Key = (session.number, turn, branch) if front.per == "request" else (session.number,)
        return (Part(front.tokens, ("front", *changes)), *opening)

    def _flash_crowd(self) -> Iterator[DrawnRequest]:
        flash, groups = self._scenario.flash_crowd, self._groups
        if flash is None:
            return
        rng = np.random.default_rng([self._seed, _FLASH])
        tenants = self._scenario.tenants or [NO_TENANT]
        prefix = Part(flash.tokens.draw(rng), ("prefix", "flash"))
        for number, time in enumerate(
            arrival_times("poisson", constant_rate(flash.rate_per_second, flash.seconds), rng)
        ):
            if flash.at_seconds + time >= self._scenario.duration_seconds:
                return
            tenant = tenants[rng.choice(len(tenants), p=shares([tenant.weight for tenant in tenants]))]
            yield DrawnRequest(
                scheduled_s=flash.at_seconds + time,
                session=f"flash{number}",
                turn=0,
                group="flash",
                tenant=tenant,
                model=self._models.of(number, tenant),
                opening=(*self._as_text(self._tool_parts), prefix),
                said=(("user", (Part(groups.unique_tokens.draw(rng), ("user", "flash", number)),)),),
                max_tokens=groups.output_tokens.draw(rng),
                tools=self._as_field(self._tool_parts),
            )

    def _paths(self) -> Iterator[tuple[int, ...]]:
        counts = [layer.count for layer in self._layers]
        return (tuple(int(k) for k in path) for path in np.ndindex(*counts)) if counts else iter(())

    def _prefix(self, path: tuple[int, ...]) -> tuple[Part, ...]:
        """The levels' texts down this path."""
        if self._groups.nesting is None:
            return (Part(self._layer_tokens[path], ("prefix", "group", *path)),)
        return tuple(
            Part(self._tokens_at(path[: depth + 1]), ("prefix", layer.name, *path[: depth + 1]))
            for depth, layer in enumerate(self._layers)
        )

    def _tokens_at(self, path: tuple[int, ...]) -> int:
        if path not in self._layer_tokens:
            rng = np.random.default_rng([self._seed, _LENGTHS, *path])
            self._layer_tokens[path] = self._layers[len(path) - 1].tokens.draw(rng)
        return self._layer_tokens[path]

    def _own_prefix(self, number: int) -> Part:
        assert self._groups.shared_tokens is not None
        return Part(self._groups.shared_tokens.draw(self._rng), ("prefix", "session", number))

    def _pool(self, kind: str, section: Any) -> list[Part]:
        """All texts of a pool: tools, examples or documents."""
        if section is None:
            return []
        count = section.pool if kind == "shot" else section.count
        return [Part(section.tokens.draw(self._details), (kind, k)) for k in range(count)]


class _Models:
    """Each session's model, where the scenario or its tenant names several."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._scenario = scenario
        self._seed = seed

    def all_of(self, tenant: Tenant) -> Sequence[ModelShare | None]:
        """A tenant's models; [None] where nothing names one."""
        return tenant.models or self._scenario.models or [None]

    def of(self, number: int, tenant: Tenant) -> ModelShare | None:
        """The model of session `number`."""
        models = tenant.models or self._scenario.models
        if not models:
            return None
        rng = np.random.default_rng([self._seed, _MODELS, number])
        return models[rng.choice(len(models), p=shares([model.weight for model in models]))]


def _group_name(path: tuple[int, ...]) -> str:
    return f"g{'.'.join(map(str, path))}" if path else "-"


def _session_name(number: int, branch: int, turn: int, hands_over_after: int | None) -> str:
    name = f"s{number}" if not branch else f"s{number}f{branch}"
    return f"{name}-b" if hands_over_after is not None and turn > hands_over_after else name


def _new_version(prefix: tuple[Part, ...], keeps_tokens: int) -> tuple[Part, ...]:
    """The same lengths, with other words from `keeps_tokens` on."""
    changed: list[Part] = []
    kept = keeps_tokens
    for part in prefix:
        same = min(kept, part.tokens)
        kept -= same
        if same:
            changed.append(Part(same, part.key))
        if part.tokens > same:
            changed.append(Part(part.tokens - same, (*part.key, "v2")))
    return tuple(changed)
