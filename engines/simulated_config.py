"""What a simulated engine can be told, and the model limits that follow from it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engines.model import EngineConfig
from engines.step_time import DEFAULT_PROFILE, StepTime, StepTimeError, profile

_Positive = Annotated[int, Field(ge=1)]


class SimulatedEngineConfig(BaseModel):
    """One simulated engine. Names and meanings are vLLM's where vLLM has them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_dir: Path
    """Folder with the tokenizer that clients and router use, too."""
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """0 lets the system choose a free one."""
    served_model_name: str = "tiny"
    block_size: _Positive = 16
    capacity_blocks: _Positive | None = 4096
    """KV blocks of `block_size` tokens; None for no limit."""
    profile: str = DEFAULT_PROFILE
    """A name from `step_time_profiles.yaml`; `step_time` wins over it."""
    step_time: StepTime | None = None
    speed: float = Field(default=1.0, gt=0)
    """2 makes every step take half its time."""
    slow_factor: float = Field(default=1.0, gt=0)
    """A fault: 3 makes this engine's steps take three times as long as its profile says."""
    max_num_seqs: _Positive = 256
    max_num_batched_tokens: _Positive = 2048
    max_model_len: _Positive = 8192
    default_output_tokens: _Positive = 128
    """Where a chat that names no max_tokens ends."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    kv_events_endpoint: str | None = None
    """ZMQ address to publish KV events on; None for none."""
    replay_endpoint: str | None = None
    kv_events_topic: str = ""

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
        plain = self.step_time or profile(self.profile)
        factor = self.slow_factor / self.speed
        return EngineConfig(
            step_time=StepTime(**{name: seconds * factor for name, seconds in asdict(plain).items()}),
            block_size=self.block_size,
            capacity_blocks=self.capacity_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            report_events=self.kv_events_endpoint is not None,
        )
