"""The sections of a scenario that say what prompts are made of.

A prompt opens with the system message: a dynamic field, tool schemas, the group's prefix, few-shot examples, a user's
profile, in this order and each only where the scenario has it; tools that are sent as a field stand where the chat
template puts them.
User messages carry retrieved documents, then text of their own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from prefixwatch.documents.units import MOST_WORKERS, BlocksOrNone
from prefixwatch.loadgen.scenario.lengths import Popularity, Seconds, Time, Tokens
from prefixwatch.loadgen.scenario.secrets import literal_secret
from prefixwatch.loadgen.scenario.section import MOST_ITEMS, Section, has_controls

_UNIFORM = Popularity(zipf=0)
_SHUFFLED = "share of the sessions in which they come in an order of their own; 0: always the same order"


class Layer(Section):
    """One level of a nested opening: each item of the level above has `count` of its own."""

    name: str = Field(min_length=1, description="what it is, such as company, product or template")
    count: int = Field(ge=1, le=MOST_ITEMS, description="items in each item of the level above")
    tokens: Tokens = Field(description="length of an item's text, tokens")
    popularity: Popularity = Field(default=_UNIFORM, description="how sessions spread over the items")

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        self.popularity.check(self.count, "items")
        return self


class PrefixGroups(Section):
    """Groups of sessions that open with the same text, and the lengths of all other texts."""

    count: int | None = Field(
        default=None,
        ge=0,
        le=MOST_ITEMS,
        description="number of distinct shared prefixes; 0: every session has an opening of its own",
    )
    popularity: Popularity = Field(default=_UNIFORM, description="how sessions spread over the groups")
    shared_tokens: Tokens | None = Field(
        default=None, description="length of a group's shared prefix (the system message), tokens"
    )
    nesting: list[Layer] | None = Field(
        default=None,
        min_length=1,
        description="levels of shared openings, outermost first, instead of count and shared_tokens",
    )
    unique_tokens: Tokens = Field(description="length of each user message, never repeated, tokens")
    output_tokens: Tokens = Field(description="length of each answer (max_tokens), tokens")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        flat = {"count", "shared_tokens", "popularity"} & self.model_fields_set
        if self.nesting is not None and flat:
            raise ValueError(f"{', '.join(sorted(flat))} and nesting exclude each other: put them into its levels")
        if self.nesting is None:
            for key in ("count", "shared_tokens"):
                if getattr(self, key) is None:
                    raise ValueError(
                        f"{key} is missing: add it ({type(self).model_fields[key].description}), or nesting"
                    )
            self.popularity.check(self.count or 0, "groups")
        return self

    @property
    def layers(self) -> list[Layer]:
        """The opening's levels, outermost first; none where every session has an opening of its own."""
        if self.nesting is not None:
            return self.nesting
        if not self.count:
            return []
        assert self.shared_tokens is not None
        return [Layer(name="group", count=self.count, tokens=self.shared_tokens, popularity=self.popularity)]


class ToolSchemas(Section):
    """An agent's tools: in the API's own field, which the chat template renders, or as text in the system message."""

    count: int = Field(ge=1, le=MOST_ITEMS, description="number of tools; all sessions have the same ones")
    tokens: Tokens = Field(
        description="length of a tool's schema, tokens; as a field, of its description, and the JSON around it comes "
        "on top"
    )
    shuffled_share: float = Field(default=0.0, ge=0, le=1, description=_SHUFFLED)
    sent_as: Literal["text", "field"] = Field(
        default="text",
        description="text: at the head of the system message; field: in the request's field tools, which the engine's "
        "chat template renders where it likes, most at the front of the prompt",
    )
    tool_choice: Literal["none", "auto"] = Field(
        default="none",
        description="sent with the field. vLLM renders tools with either, and refuses auto without a tool parser; "
        "SGLang renders them with auto only",
    )


class FewShot(Section):
    """Examples after the group's prefix."""

    pool: int = Field(ge=1, le=MOST_ITEMS, description="examples there are; all groups draw on the same ones")
    shots: int = Field(ge=1, description="examples in a session's opening, drawn from the pool")
    tokens: Tokens = Field(description="length of an example, tokens")
    shuffled_share: float = Field(default=0.0, ge=0, le=1, description=_SHUFFLED)

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.shots > self.pool:
            raise ValueError(f"shots {self.shots} exceeds pool {self.pool}, the number of examples")
        return self


class Documents(Section):
    """Retrieved texts (RAG) at the head of every user message."""

    count: int = Field(ge=1, le=MOST_ITEMS, description="documents there are")
    per_turn: int = Field(default=3, ge=1, description="documents in a user message, all different")
    tokens: Tokens = Field(description="length of a document, tokens")
    popularity: Popularity = Field(default=_UNIFORM, description="how often each document is retrieved")
    order: Literal["varying", "fixed"] = Field(
        default="varying",
        description="varying: as retrieved, so that the same documents seldom make the same opening; fixed: by number",
    )

    @model_validator(mode="after")
    def _enough(self) -> Self:
        self.popularity.check(self.count, "documents")
        possible = sum(1 for share in self.popularity.shares(self.count) if share > 0)
        if self.per_turn > possible:
            raise ValueError(f"per_turn {self.per_turn} is above the {possible} documents that can be drawn")
        return self


class DynamicFront(Section):
    """A field that changes, such as a time or a request id, in front of everything: nothing behind it can be reused."""

    tokens: int = Field(default=8, ge=1, description="its length, tokens")
    per: Literal["request", "session"] = Field(default="request", description="when it changes")
    share: float = Field(default=1.0, ge=0, le=1, description="share of the sessions that have it")


class Rollout(Section):
    """A new version of the groups' prefixes, brought out while the run goes on."""

    at_seconds: float = Field(ge=0, description="when the first session gets the new version")
    over_seconds: float = Field(
        default=0.0, ge=0, description="time until all new sessions get it, their share growing evenly; 0: at once"
    )
    keeps_tokens: int = Field(default=0, ge=0, description="tokens at the head of the prefix that stay the same")


class FlashCrowd(Section):
    """A burst of sessions on a prefix that nobody has sent before, on top of the other traffic (open loop only)."""

    at_seconds: float = Field(ge=0, description="when it starts")
    seconds: float = Field(gt=0, description="how long it lasts")
    rate_per_second: float = Field(gt=0, description="sessions a second, Poisson, one request each")
    tokens: Tokens = Field(description="length of the new prefix, tokens")


class Forks(Section):
    """Sessions that go on in several ways from one point, as edited or regenerated turns and parallel agents do."""

    share: float = Field(ge=0, le=1, description="share of the sessions of two turns and more that fork")
    branches: int = Field(default=2, ge=2, description="ways in which a forked session goes on")


def _as_turn_weights(value: Any) -> Any:
    return {value: 1.0} if isinstance(value, int) else value


class Sessions(Section):
    """Conversations: each turn sends all of the conversation before it."""

    turns: Annotated[
        dict[Annotated[int, Field(ge=1)], Annotated[float, Field(ge=0)]], BeforeValidator(_as_turn_weights)
    ] = Field(
        default={1: 1.0}, description="turns in a session: a number, or a map of number of turns to relative weight"
    )
    think_seconds: Time = Field(
        default=Seconds(min=0, max=0),
        description="time between a turn and the next: a number, {min, max} or {mean}. Open loop: between the times "
        "at which they are due, whether or not the answer is there; closed loop: after the answer",
    )
    later_tokens: Tokens | None = Field(
        default=None,
        description="length of the user messages after a session's first, such as an agent's tool results; "
        "default: as the first (groups.unique_tokens)",
    )
    forks: Forks | None = Field(default=None, description="sessions that branch")
    handover_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the sessions of two turns and more that go on under a new session id, as on another "
        "device; header x-user-id stays",
    )
    users: int | None = Field(
        default=None,
        ge=1,
        le=MOST_ITEMS,
        description="number of users, who begin sessions in turn (header x-user-id); default: nobody is told apart",
    )
    profile_tokens: Tokens | None = Field(
        default=None,
        description="length of what the system message says of the user at its end, the same in all of a user's "
        "sessions, tokens; needs users",
    )
    answers: Literal["planned", "generated"] = Field(
        default="planned",
        description="what later turns carry as earlier answers: planned texts, the same in every run, or what the "
        "engine generated. Generated ones make a turn wait for the answer before, and prompts' lengths an estimate",
    )

    @model_validator(mode="after")
    def _some_weight(self) -> Self:
        if sum(self.turns.values()) <= 0:
            raise ValueError("turns: the weights add up to 0: make at least one positive")
        if self.profile_tokens is not None and self.users is None:
            raise ValueError("profile_tokens needs users: say how many there are")
        if self.answers == "generated" and (self.forks is not None or self.handover_share):
            raise ValueError("answers: generated goes neither with forks nor with handover_share: take one out")
        return self

    @property
    def mean_turns(self) -> float:
        return sum(turns * weight for turns, weight in self.turns.items()) / sum(self.turns.values())

    @property
    def mean_requests(self) -> float:
        """Requests of a session and its branches; a fork repeats half of the turns on average."""
        if self.forks is None:
            return self.mean_turns
        again = self.forks.share * (self.forks.branches - 1) / 2
        total = sum(w * turns * (1 + again * (turns > 1)) for turns, w in self.turns.items())
        return total / sum(self.turns.values())


class ModelShare(Section):
    """One of several models, or LoRA adapters, that requests ask for; each has cache entries of its own."""

    name: str = Field(min_length=1, description="model name in the request; for an adapter, its name")
    weight: float = Field(default=1.0, gt=0, description="relative share of the sessions")


class Tenant(Section):
    """One of the customers whose requests are mixed."""

    name: str = Field(min_length=1, description="name, sent in the tenant header")
    weight: float = Field(default=1.0, gt=0, description="relative share of the sessions")
    salt: str | None = Field(
        default=None, min_length=1, description="cache salt: caches are shared only under the same salt"
    )
    priority: int | None = Field(
        default=None, description="priority field of its requests; vLLM's scheduler serves lower numbers first"
    )
    headers: dict[str, str] = Field(
        default={},
        description="further headers of its requests; `${NAME}` in a value is that environment variable's when it is "
        "sent, for keys that results must not hold",
    )
    request_class: str | None = Field(
        default=None, min_length=1, description="class that objectives select its requests by; default: the scenario's"
    )
    models: list[ModelShare] | None = Field(
        default=None, min_length=1, description="models it asks for; default: the scenario's"
    )

    @field_validator("name")
    @classmethod
    def _fits_a_header(cls, name: str) -> str:
        if has_controls(name):
            raise ValueError("holds a line break or another control character, which no header can carry: take it out")
        return name

    @field_validator("headers")
    @classmethod
    def _may_be_sent(cls, headers: dict[str, str]) -> dict[str, str]:
        if any(has_controls(text) for text in (*headers, *headers.values())):
            raise ValueError("holds a line break or another control character, which no header can carry: take it out")
        if (name := literal_secret(headers)) is not None:
            raise ValueError(
                f"{name} would be copied into every result: name the environment variable that holds it, such as "
                f"'Bearer ${{TENANT_KEY}}'"
            )
        return headers


class Timeouts(Section):
    """When the client gives up on a request; it then counts as timed out, never as absent."""

    first_token_seconds: float = Field(default=60.0, gt=0, description="wait for the first token, from the send")
    inter_token_seconds: float = Field(default=30.0, gt=0, description="wait between two tokens: a silent stall")
    total_seconds: float = Field(default=300.0, gt=0, description="whole request, from the send")


class EngineHints(Section):
    """What `bench` starts when it starts the engines itself."""

    workers: int | None = Field(default=None, ge=1, le=MOST_WORKERS, description="number of engines")
    routers: int = Field(
        default=1, ge=1, description="router replicas in `simulate`, each with a memory of its own; `bench` starts one"
    )
    block_size: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="tokens of a KV block; default: the engine's own, 16 for simulated ones. vLLM on CPU takes "
        "multiples of 32. capacity_blocks counts these blocks",
    )
    capacity_blocks: BlocksOrNone = Field(default=None, ge=1, description="KV blocks an engine can hold")
    max_model_len: int | None = Field(
        default=None, ge=1, description="longest prompt and answer together that a simulated engine takes, tokens"
    )
    profile: str | None = Field(default=None, description="speed profile of the simulated engine")
