"""Scenarios: what traffic a run sends, as YAML that explains itself when it's wrong."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from documents import DocumentError, load

SHIPPED_FOLDER = Path(__file__).parent / "scenarios"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenRange(_Section):
    """A length in tokens, drawn evenly between two bounds (both included). A plain number fixes it."""

    min: int = Field(ge=1, description="shortest length, tokens")
    max: int = Field(ge=1, description="longest length, tokens")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}: swap them")
        return self


def _as_range(value: Any) -> Any:
    return {"min": value, "max": value} if isinstance(value, int) else value


Tokens = Annotated[TokenRange, BeforeValidator(_as_range)]


class Arrivals(_Section):
    """When requests come. Open loop: the times are drawn beforehand and never wait for answers."""

    kind: Literal["poisson"] = Field(default="poisson", description="the arrival process: poisson")
    rate_per_second: float = Field(
        gt=0,
        description="requests a second on average, all turns of a session counted; sessions start at this rate "
        "divided by their mean number of turns",
    )


class Popularity(_Section):
    """How requests spread over the groups: one of the two keys."""

    zipf: float | None = Field(
        default=None, ge=0, description="Zipf exponent: group k is asked in proportion to 1/k^exponent; 0 is uniform"
    )
    weights: list[Annotated[float, Field(ge=0)]] | None = Field(
        default=None, description="one relative weight a group, in order"
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.zipf is None) == (self.weights is None):
            raise ValueError("give either zipf or weights")
        if self.weights is not None and sum(self.weights) <= 0:
            raise ValueError("weights add up to 0: make at least one positive")
        return self


class PrefixGroups(_Section):
    """Groups of sessions that open with the same text."""

    count: int = Field(
        ge=0, description="number of distinct shared prefixes; 0: every session has an opening of its own"
    )
    popularity: Popularity = Field(default=Popularity(zipf=0), description="how sessions spread over the groups")
    shared_tokens: Tokens = Field(description="length of a group's shared prefix (the system message), tokens")
    unique_tokens: Tokens = Field(description="length of each user message, never repeated, tokens")
    output_tokens: Tokens = Field(description="length of each answer (max_tokens), tokens")

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        weights = self.popularity.weights
        if weights is not None and len(weights) != self.count:
            raise ValueError(f"popularity has {len(weights)} weights for {self.count} groups: give one a group")
        return self


def _as_turn_weights(value: Any) -> Any:
    return {value: 1.0} if isinstance(value, int) else value


class Sessions(_Section):
    """Conversations: each turn sends all of the conversation before it."""

    turns: Annotated[
        dict[Annotated[int, Field(ge=1)], Annotated[float, Field(ge=0)]], BeforeValidator(_as_turn_weights)
    ] = Field(
        default={1: 1.0}, description="turns in a session: a number, or a map of number of turns to relative weight"
    )
    think_seconds: float = Field(
        default=0.0,
        ge=0,
        description="turn k is sent at the session's start plus k times this, whether or not the answer is there",
    )

    @model_validator(mode="after")
    def _some_weight(self) -> Self:
        if sum(self.turns.values()) <= 0:
            raise ValueError("turns: the weights add up to 0: make at least one positive")
        if max(self.turns) > 1 and self.think_seconds <= 0:
            raise ValueError("think_seconds must be above 0 when a session has more than one turn")
        return self

    @property
    def mean_turns(self) -> float:
        return sum(turns * weight for turns, weight in self.turns.items()) / sum(self.turns.values())


class Tenant(_Section):
    """One of the customers whose requests are mixed."""

    name: str = Field(min_length=1, description="name, sent in the tenant header")
    weight: float = Field(default=1.0, gt=0, description="relative share of the sessions")
    salt: str | None = Field(
        default=None, min_length=1, description="cache salt: caches are shared only under the same salt"
    )


class Timeouts(_Section):
    """When the client gives up on a request; it then counts as timed out, never as absent."""

    first_token_seconds: float = Field(default=60.0, gt=0, description="wait for the first token, from the send")
    inter_token_seconds: float = Field(default=30.0, gt=0, description="wait between two tokens: a silent stall")
    total_seconds: float = Field(default=300.0, gt=0, description="whole request, from the send")


class EngineHints(_Section):
    """What `bench` starts when it starts the engines itself."""

    workers: int | None = Field(default=None, ge=1, description="number of engines")
    capacity_blocks: int | None = Field(default=None, ge=1, description="KV blocks an engine can hold")
    profile: str | None = Field(default=None, description="speed profile of the simulated engine")


class Scenario(_Section):
    """One kind of traffic and how it's judged."""

    name: str = Field(min_length=1, description="short name, as in file names and reports")
    description: str = Field(default="", description="what it shows, in a sentence or two")
    duration_seconds: float = Field(gt=0, description="length of the measured phase; requests due later aren't sent")
    arrivals: Arrivals = Field(description="when requests come")
    groups: PrefixGroups = Field(description="shared prefixes, their popularity and all lengths")
    sessions: Sessions = Field(default=Sessions(), description="turns and think time")
    tenants: list[Tenant] = Field(default=[], description="tenants; none: all requests are of one, unnamed")
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
    slo: list[str] = Field(default=[], description="names of the SLO documents that grade it")
    request_class: str = Field(default="interactive", min_length=1, description="class that objectives select by")

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [tenant.name for tenant in self.tenants]
        if len(set(names)) < len(names):
            raise ValueError("two tenants have the same name: rename one")
        return self


def shipped_scenarios() -> list[str]:
    """Names of the scenarios that come with the project."""
    return sorted(path.stem for path in SHIPPED_FOLDER.glob("*.yaml"))


def load_scenario(name_or_path: str | Path) -> Scenario:
    """A shipped scenario by its name, or a file by its path. Raises DocumentError."""
    path = Path(name_or_path)
    if not path.suffix and path.name == str(name_or_path):
        path = SHIPPED_FOLDER / f"{name_or_path}.yaml"
    if not path.is_file():
        close = difflib.get_close_matches(path.stem, shipped_scenarios(), n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise DocumentError(
            f"no scenario '{name_or_path}': {hint}give a path to a .yaml file "
            f"or one of the shipped names: {', '.join(shipped_scenarios())}"
        )
    return load(path, Scenario)
