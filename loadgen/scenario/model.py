"""Scenarios: what traffic a run sends, as YAML that explains itself when it's wrong. Reference: docs/scenarios.md."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from prefixwatch.documents import DocumentError, load
from prefixwatch.documents.hints import did_you_mean
from prefixwatch.loadgen.plan.request import Trimming
from prefixwatch.loadgen.scenario.arrivals_section import Arrivals
from prefixwatch.loadgen.scenario.cache_section import Cache
from prefixwatch.loadgen.scenario.fleet_section import Event, EventPlan, Workers, event_plan
from prefixwatch.loadgen.scenario.moves_section import Moves
from prefixwatch.loadgen.scenario.prompts_section import (
    Documents,
    DynamicFront,
    EngineHints,
    FewShot,
    FlashCrowd,
    ModelShare,
    PrefixGroups,
    Rollout,
    Sessions,
    Tenant,
    Timeouts,
    ToolSchemas,
)
from prefixwatch.loadgen.scenario.reuse_section import ReuseObjective
from prefixwatch.loadgen.scenario.section import Section

__all__ = ["Arrivals", "Replay", "Scenario", "Search", "Tenant", "Timeouts", "load_scenario", "shipped_scenarios"]

DEFAULT_WORKERS = 4
SHIPPED_FOLDER = Path(__file__).parents[1] / "scenarios"
OWN_BODY_FIELDS = frozenset(
    {"cache_salt", "max_tokens", "messages", "model", "priority", "stream", "stream_options", "tool_choice", "tools"}
)
"""What a plan puts into a request's body, or what reading its answer depends on."""


class Replay(Section):
    """Requests of a file, with its times, lengths and, where it has them, its texts, instead of drawn ones."""

    file: Path | None = Field(default=None, description="the file; `--trace` gives it on the command line")
    format: str | None = Field(
        default=None, description="kind of the file, see Recordings; default: detected from the content"
    )
    time_unit: Literal["s", "ms", "us", "ns"] | None = Field(
        default=None, description="unit of a trace's time stamps; default: that of its dialect"
    )
    block_tokens: int | None = Field(
        default=None, ge=1, description="tokens per block id of a trace; default: detected from the rows"
    )
    rate_per_second: float | None = Field(
        default=None,
        gt=0,
        description="begin sessions at this mean rate in place of the recorded times; for files without times",
    )
    speed: float = Field(default=1.0, gt=0, description="this many times as fast as recorded")
    limit: int | None = Field(default=None, ge=1, description="only this number of requests from the start")
    from_seconds: float | None = Field(
        default=None, ge=0, description="only requests from here on, seconds from the first"
    )
    until_seconds: float | None = Field(default=None, gt=0, description="only requests before this")
    answers: Literal["recorded", "generated"] = Field(
        default="recorded",
        description="what later turns of a recorded conversation carry as earlier answers: what the file has, or what "
        "the engine generates in this run",
    )

    @property
    def path(self) -> Path:
        """The file. Raises DocumentError where none is given."""
        if self.file is None:
            raise DocumentError("replay.file: missing: name the recording in the scenario, or give --trace FILE")
        return self.file


class Search(Section):
    """How `bench --search-rate` finds the highest rate that still meets the objectives."""

    start_per_second: float | None = Field(
        default=None, gt=0, description="rate to try first, requests a second; default: the scenario's mean rate"
    )
    min_per_second: float = Field(default=0.05, gt=0, description="lowest rate to try; below it the search gives up")
    max_per_second: float = Field(default=10_000.0, gt=0, description="highest rate to try")
    precision_ratio: float = Field(
        default=0.05, gt=0, description="the search ends when the failing rate is at most this much above the passing"
    )
    repeats: int = Field(default=4, ge=1, description="runs of one rate at most, while its verdict is open")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.min_per_second <= (self.start_per_second or self.min_per_second) <= self.max_per_second:
            raise ValueError("start_per_second must lie between min_per_second and max_per_second")
        return self


class Scenario(Section):
    """One kind of traffic and how it's judged."""

    name: str = Field(min_length=1, description="short name, as in file names and reports")
    description: str = Field(default="", description="what it shows, in a sentence or two")
    duration_seconds: float = Field(
        gt=0,
        description="length of the traffic, warm-up and cool-down included; requests due later aren't sent. A closed "
        "loop sends all of its requests, however long that takes",
    )
    warm_up_seconds: float = Field(
        default=0.0,
        ge=0,
        description="requests due this early in duration_seconds are sent and logged, but not graded",
    )
    cool_down_seconds: float = Field(
        default=0.0,
        ge=0,
        description="so are requests due this late in it, whose answers see the traffic ebb; open loops only",
    )
    arrivals: Arrivals | None = Field(default=None, description="when requests come; needed unless replay is given")
    groups: PrefixGroups | None = Field(
        default=None, description="shared prefixes, their popularity and all lengths; needed unless replay is given"
    )
    tools: ToolSchemas | None = Field(default=None, description="tool schemas of every request, as text or as a field")
    few_shot: FewShot | None = Field(default=None, description="examples at the end of every opening")
    documents: Documents | None = Field(default=None, description="retrieved texts in every user message")
    dynamic_front: DynamicFront | None = Field(default=None, description="a changing field in front of every prompt")
    rollout: Rollout | None = Field(default=None, description="a new version of the prefixes during the run")
    flash_crowd: FlashCrowd | None = Field(default=None, description="a burst on a new prefix during the run")
    sessions: Sessions = Field(default=Sessions(), description="turns, think time, branches")
    replay: Replay | None = Field(default=None, description="send a recorded file's requests")
    tenants: list[Tenant] = Field(default=[], description="tenants; none: all requests are of one, unnamed")
    models: list[ModelShare] = Field(
        default=[],
        description="models or LoRA adapters to ask for, all of them served; none: the model that is",
    )
    isolation: bool = Field(
        default=False,
        description="tenants must not share cache entries: what only another tenant sent counts as a violation when "
        "it is reused, salted or not",
    )
    prime: bool = Field(
        default=False,
        description="before measuring, send one request a group and tenant, each waited for, that isn't graded",
    )
    warm: bool = Field(
        default=False,
        description="repeat the same prompts in every run (caches may be warm); false: a run's prompts are its own",
    )
    timeouts: Timeouts = Field(default=Timeouts(), description="when the client gives up")
    extra_body: dict[str, Any] = Field(
        default={}, description="fields added to every request body, such as ignore_eos: true for fixed lengths"
    )
    engine: EngineHints = Field(default=EngineHints(), description="what bench starts for it")
    fleet: list[Workers] = Field(
        default=[], description="unlike workers, instead of engine.workers equal ones; `--workers` doesn't go with it"
    )
    events: list[Event] = Field(
        default=[], description="what happens to the fleet during the run; the report shows each one's effect"
    )
    moves: Moves | None = Field(
        default=None,
        description="sessions of a worker that leaves are moved on purpose, by the cheaper way; without it they follow "
        "the policy",
    )
    cache: Cache | None = Field(
        default=None, description="KV beyond the GPUs: shared, pulled or in tiers; `simulate` only"
    )
    slo: list[str] = Field(default=[], description="SLO documents that grade it: shipped names, or files (.yaml)")
    reuse_objective: ReuseObjective | None = Field(
        default=None, description="what reuse is worth by block class, and what a slow tail costs: one figure"
    )
    search: Search = Field(default=Search(), description="the search for the highest rate")
    request_class: str = Field(default="interactive", min_length=1, description="class that objectives select by")

    @field_validator("extra_body")
    @classmethod
    def _adds_only(cls, extra_body: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(OWN_BODY_FIELDS & extra_body.keys()):
            raise ValueError(f"{', '.join(taken)}: the plan says what is in it: take it out")
        return extra_body

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = [tenant.name for tenant in self.tenants]
        if len(set(names)) < len(names):
            raise ValueError("two tenants have the same name: rename one")
        if self.warm_up_seconds + self.cool_down_seconds >= self.duration_seconds:
            raise ValueError(
                f"warm_up_seconds and cool_down_seconds leave nothing to measure: together they must be shorter than "
                f"duration_seconds, {self.duration_seconds:g}"
            )
        self._check_fleet()
        if self.replay is not None:
            self._check_replay()
        else:
            self._check_drawn()
        return self

    def _check_fleet(self) -> None:
        if self.fleet and self.engine.workers is not None:
            raise ValueError("fleet and engine.workers both say how many workers there are: take one out")
        roles = {kind.role for kind in self.fleet}
        if roles not in (set(), {None}, {"prefill", "decode"}):
            raise ValueError("fleet: a split fleet has workers with role prefill and with role decode, and no others")
        if late := [event.at for event in self.events if event.at >= self.duration_seconds]:
            raise ValueError(
                f"events: at {late[0]:g} is not before the end, duration_seconds {self.duration_seconds:g}: nobody "
                "would see it"
            )
        if roles - {None} and self.cache is not None:
            raise ValueError("cache: a split fleet can't have one yet: take out role, or cache")
        if roles - {None} and self.events:
            raise ValueError("events: a split fleet can't have any: take out role, or events")
        if self.fleet or self.engine.workers is not None:
            self.event_plan()

    def _check_replay(self) -> None:
        drawn = {"arrivals", "groups", "tools", "few_shot", "documents", "dynamic_front", "rollout", "flash_crowd"}
        if strange := sorted((drawn | {"sessions", "prime"}) & self.model_fields_set):
            raise ValueError(f"replay sends what its file has: take out {', '.join(strange)}, or replay")

    def _check_drawn(self) -> None:
        for key in ("arrivals", "groups"):
            if getattr(self, key) is None:
                raise ValueError(f"{key} is missing: add it ({type(self).model_fields[key].description})")
        assert self.arrivals is not None
        closed, thinks = self.arrivals.closed, self.sessions.think_seconds.positive
        if max(self.sessions.turns) > 1 and not closed and not thinks:
            raise ValueError("sessions: think_seconds must be above 0 when a session has more than one turn")
        if closed and self.cool_down_seconds:
            raise ValueError("cool_down_seconds needs an open loop: nobody knows beforehand when a closed one ends")
        if closed and self.flash_crowd is not None:
            raise ValueError("flash_crowd needs an open loop: a closed one never sends more than its users do")

    @property
    def trimming(self) -> Trimming:
        """Which of its requests are graded."""
        until_s = self.duration_seconds - self.cool_down_seconds if self.cool_down_seconds else inf
        return Trimming(self.warm_up_seconds, until_s)

    @property
    def workers(self) -> int:
        """Workers at the start; 4 where the scenario doesn't say."""
        return sum(kind.count for kind in self.fleet) or self.engine.workers or DEFAULT_WORKERS

    @property
    def prefill_workers(self) -> int | None:
        """Workers of a split fleet that only prefill; None where the fleet isn't split."""
        return sum(kind.count for kind in self.fleet if kind.role == "prefill") or None

    @property
    def profiles(self) -> str | None:
        """The step-time profiles of its simulated engines, in words; None: the default's."""
        named = dict.fromkeys(kind.profile or self.engine.profile for kind in self.fleet) or [self.engine.profile]
        return ", ".join(name for name in named if name) or None

    def event_plan(self, workers: int | None = None) -> EventPlan:
        """What happens to a fleet of this size, or the scenario's own. Raises ValueError."""
        return event_plan(self.events, workers or self.workers)

    @property
    def mean_rate(self) -> float | None:
        """Requests a second over the run, as the scenario asks for; None where that is not for it to say."""
        if self.arrivals is None or self.arrivals.kind in ("closed", "trace"):
            return None
        return self.arrivals.curve(self.duration_seconds).total / self.duration_seconds

    def at_rate(self, rate_per_second: float) -> Scenario:
        """The same traffic with another mean rate. Raises ValueError where it has no rate to set."""
        if self.arrivals is None:
            raise ValueError("a replay has the rate of its file: set replay.speed")
        return self.model_copy(update={"arrivals": self.arrivals.at_rate(rate_per_second, self.duration_seconds)})

    def at_concurrency(self, users: int) -> Scenario:
        """The same traffic in a closed loop of this number of users."""
        closed = Arrivals(kind="closed", concurrency=users)
        return self.model_copy(update={"arrivals": closed, "cool_down_seconds": 0.0})


def shipped_scenarios() -> list[str]:
    """Names of the scenarios that come with the project."""
    return sorted(path.stem for path in SHIPPED_FOLDER.glob("*.yaml"))


def load_scenario(name_or_path: str | Path) -> Scenario:
    """A shipped scenario by its name, or a file by its path. Raises DocumentError.

    Files that a scenario names are looked for beside it.
    """
    path = Path(name_or_path)
    if not path.suffix and path.name == str(name_or_path):
        path = SHIPPED_FOLDER / f"{name_or_path}.yaml"
    if not path.is_file():
        hint = did_you_mean(path.stem, shipped_scenarios())
        raise DocumentError(f"no scenario '{name_or_path}': {hint} (or give the path of a .yaml file)")
    return _with_files_beside(load(path, Scenario), path.parent)


def _with_files_beside(scenario: Scenario, folder: Path) -> Scenario:
    update: dict[str, Any] = {}
    for key in ("arrivals", "replay"):
        section = getattr(scenario, key)
        if section is not None and section.file is not None:
            update[key] = section.model_copy(update={"file": folder.resolve() / section.file})
    if any(name.endswith((".yaml", ".yml")) for name in scenario.slo):
        update["slo"] = [
            str(folder.resolve() / name) if name.endswith((".yaml", ".yml")) else name for name in scenario.slo
        ]
    return scenario.model_copy(update=update) if update else scenario
