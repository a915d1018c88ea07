"""A simulated engine's settings, and the model limits that follow from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from prefixwatch.engines.model.engine import EngineConfig
from prefixwatch.engines.model.kinds import EngineKind
from prefixwatch.engines.model.profiles import DEFAULT_PROFILE, profile
from prefixwatch.engines.model.step_time import StepTime, StepTimeError
from prefixwatch.engines.simulated.openai_api import UsageFields

_Positive = Annotated[int, Field(ge=1)]


class SimulatedEngineConfig(BaseModel):
    """One simulated engine. Names and meanings are vLLM's where vLLM has them."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: EngineKind = "vllm"
    """Whose scheduler, metrics page, usage fields and KV events it has: `vllm`, `sglang` or `tensorrt-llm`."""
    cache_report: bool = True
    """Answers say how many prompt tokens were cached; SGLang's do with `--enable-cache-report` only."""
    model_dir: Path
    """Folder with the tokenizer, the same that clients and router use."""
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """The port to listen on; 0 picks a free one."""
    served_model_name: str = "tiny"
    """The model's name in requests and answers."""
    block_size: _Positive = 16
    """Tokens per KV block."""
    capacity_blocks: _Positive | None = 4096
    """KV blocks in the cache; null for no limit."""
    profile: str = DEFAULT_PROFILE
    """A shipped profile, or a file that ends in .yaml; `step_time` wins over it."""
    step_time: StepTime | None = None
    """Step times as a table of their own, instead of a profile."""
    speed: float = Field(default=1.0, gt=0)
    """2 makes every step take half its time."""
    slow_factor: float = Field(default=1.0, gt=0)
    """A fault: 3 makes this engine's steps take three times as long as its profile says."""
    ignore_cache_salt: bool = False
    """A fault: requests with different `cache_salt` share their blocks, as in llama.cpp or a store that drops it."""
    max_num_seqs: _Positive = 256
    """Requests in one batch."""
    max_num_batched_tokens: _Positive = 2048
    """Tokens computed per step."""
    max_model_len: _Positive = 8192
    """Longest prompt and answer together, in tokens."""
    default_output_tokens: _Positive = 128
    """Length of an answer whose request has no max_tokens."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the generated words."""
    kv_events_endpoint: str | None = None
    """ZMQ address to publish KV events on; null: none are published."""
    replay_endpoint: str | None = None
    """ZMQ address where past KV events can be requested again."""
    kv_events_topic: str = ""
    """Topic of the KV events."""

    @model_validator(mode="after")
    def _consistent(self) -> SimulatedEngineConfig:
        if self.step_time is None:
            try:
                profile(self.profile)
            except StepTimeError as error:
                raise ValueError(str(error)) from error
        if self.capacity_blocks is not None and self.capacity_blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"capacity_blocks {self.capacity_blocks} × block_size {self.block_size} holds fewer tokens than "
                f"max_model_len {self.max_model_len}: raise capacity_blocks or lower max_model_len"
            )
        if self.replay_endpoint and not self.kv_events_endpoint:
            raise ValueError("replay_endpoint needs kv_events_endpoint")
        return self

    def engine_config(self) -> EngineConfig:
        """The model's limits; speed and faults are folded into the step time."""
        plain = self.step_time or profile(self.profile).step_time
        factor = self.slow_factor / self.speed
        return EngineConfig(
            step_time=plain.scaled(factor),
            block_size=self.block_size,
            capacity_blocks=self.capacity_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            kind=self.kind,
            report_events=self.kv_events_endpoint is not None or self.kind == "tensorrt-llm",
        )

    @property
    def usage_fields(self) -> UsageFields:
        """What its answers' usage has besides the three counts."""
        return UsageFields(cached_tokens=self.cache_report, reasoning_tokens=self.kind == "sglang")
