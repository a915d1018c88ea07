"""The `probes` section of the exporter's configuration: what is asked, how often, and what it may cost."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from prefixwatch.documents.durations import Duration
from prefixwatch.exporters.http.client_config import ClientConfig, Strict, http_address

Tokens = Annotated[int, Field(gt=0)]


class ProbeTarget(ClientConfig):
    """An OpenAI-compatible endpoint: one engine, or a router in front of several."""

    name: str = Field(min_length=1, description="its name on the metrics page; a scraped target's, if it is one")
    url: str = Field(description="its address without /v1, e.g. http://host:8000")
    model: str | None = Field(default=None, description="the model to ask; without it the first that /v1/models lists")
    api: Literal["completions", "chat"] = Field(default="completions", description="completions or chat")

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        http_address(url, "http://host:8000")
        return url.rstrip("/").removesuffix("/v1")


class Identity(Strict):
    """Who a canary is sent as."""

    http_headers: dict[str, SecretStr] = Field(default={}, description="headers that make it this tenant's")
    salted: bool = Field(default=True, description="send a cache_salt of its own; false where the router salts")


class IsolationConfig(Strict):
    """The canary: a prompt as tenant `first`, then the same as `second`, which must find nothing cached."""

    every_rounds: Annotated[int, Field(gt=0)] = Field(default=10, description="every how many rounds of a target")
    first: Identity = Field(default=Identity(), description="who sends the prompt")
    second: Identity = Field(default=Identity(), description="who sends it again and must not hit")

    @model_validator(mode="after")
    def _differ(self) -> Self:
        if not (self.first.salted or self.second.salted) and self.first.http_headers == self.second.http_headers:
            raise ValueError("first and second are the same tenant: give them different http_headers or a salt")
        return self


class ProbeConfig(Strict):
    """Probes of every target, each on its own schedule."""

    targets: tuple[ProbeTarget, ...] = Field(min_length=1, description="the endpoints to ask")
    interval_seconds: Duration = Field(default=60.0, description="time between two rounds of a target")
    jitter_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.2, description="how far a round may stray from its time, as a share of the interval"
    )
    prompt_tokens: tuple[Tokens, ...] = Field(
        default=(256, 1024, 4096), min_length=1, description="lengths of the prompts, taken in turn"
    )
    max_output_tokens: Tokens = Field(default=4, description="output tokens a probe asks for")
    tokens_per_minute: Tokens = Field(default=60_000, description="what all probes together may cost")
    target_tokens_per_minute: Tokens = Field(default=20_000, description="what the probes of one target may cost")
    max_waiting_requests: Annotated[float, Field(ge=0)] = Field(
        default=0, description="no probe while more requests than this wait at the target"
    )
    timeout_seconds: Duration = Field(default=30.0, description="how long one probe may take")
    isolation: IsolationConfig | None = Field(default=None, description="a canary between two tenants")

    @model_validator(mode="after")
    def _affordable(self) -> Self:
        names = [target.name for target in self.targets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"target names must differ, given more than once: {', '.join(twice)}")
        times = 3 if self.isolation else 2
        dearest = times * (max(self.prompt_tokens) + self.max_output_tokens)
        for name in ("target_tokens_per_minute", "tokens_per_minute"):
            if getattr(self, name) < dearest:
                raise ValueError(
                    f"{max(self.prompt_tokens)} prompt tokens sent {times} times cost {dearest}, more than {name} "
                    f"{getattr(self, name)} allows: raise it or leave that length out of prompt_tokens"
                )
        return self
