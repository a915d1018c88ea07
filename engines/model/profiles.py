"""Named hardware: how long an engine's steps take, with what was measured and what is assumed.

`step_time_profiles.yaml` has short tables of measurements to which a linear step time is fitted. Each file in
`engines/profiles/` has full tables of one system and model (`engines.model.hardware` makes them).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from prefixwatch import documents
from prefixwatch.documents.section import Section
from prefixwatch.engines.model.step_table import Grid, StepTable
from prefixwatch.engines.model.step_time import StepSample, StepTime, StepTimeError, StepWork, fit, prefill_work

DEFAULT_PROFILE = "assumed-gpu"


@dataclass(frozen=True, slots=True)
class Profile:
    """A named step time. `capacity_blocks` (of `block_size` tokens) is None where the source doesn't say."""

    name: str
    measured: str
    assumed: str
    step_time: StepTime | StepTable
    samples: tuple[StepSample, ...] = ()
    """What a linear step time was fitted to; empty for tables."""
    capacity_blocks: int | None = None
    block_size: int = 16
    gpus: int = 1
    """GPUs of one engine."""
    max_num_batched_tokens: int = 8192


class _Table(Section):
    rows: tuple[float, ...]
    columns: tuple[float, ...]
    values: tuple[tuple[float, ...], ...] = Field(description="milliseconds, one list per row")

    def grid(self) -> Grid:
        return Grid(self.rows, self.columns, self.values).scaled(1e-3)


class ProfileDocument(Section):
    """A file of measured step times, as `engines.model.hardware.tabulate` makes it."""

    measured: str = Field(description="what was measured, and by whom")
    assumed: str = Field(description="what was not")
    gpus: int = Field(ge=1, description="GPUs of one engine")
    max_num_batched_tokens: int = Field(ge=1, description="tokens that a step computes at most")
    block_size: int = Field(ge=1, description="tokens of a KV block")
    capacity_blocks: int | None = Field(default=None, ge=1, description="KV blocks that fit; null: not known")
    interpolation_error: dict[str, float] = Field(
        description="relative error between the points of a table, or of the fit"
    )
    fitted_ms: dict[str, tuple[float, float, float]] = Field(
        default={}, description="of a fitted profile: each coefficient and its 95 % interval"
    )
    prefill_ms: _Table = Field(description="rows: tokens computed; columns: tokens cached before them")
    decode_ms: _Table = Field(description="rows: sequences; columns: mean length of each in tokens")

    def profile(self, name: str) -> Profile:
        """Raises StepTimeError for tables that don't make sense."""
        table = StepTable(self._grid(name, "prefill_ms"), self._grid(name, "decode_ms"))
        return Profile(
            name,
            self.measured,
            self.assumed,
            table,
            capacity_blocks=self.capacity_blocks,
            block_size=self.block_size,
            gpus=self.gpus,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def _grid(self, name: str, key: str) -> Grid:
        table: _Table = getattr(self, key)
        try:
            return table.grid()
        except ValueError as error:
            raise StepTimeError(f"profile {name}: {key}: {error}") from error


@cache
def profiles() -> dict[str, Profile]:
    """Every shipped profile by name."""
    text = resources.files("prefixwatch.engines.model").joinpath("step_time_profiles.yaml").read_text()
    found = {}
    for name, table in yaml.safe_load(text).items():
        samples = tuple(_samples(table))
        budget = table["max_num_batched_tokens"]
        step_time = fit(samples)
        found[name] = Profile(
            name, table["measured"], table["assumed"], step_time, samples, max_num_batched_tokens=budget
        )
    for file in sorted(resources.files("prefixwatch.engines.profiles").iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".yaml"):
            name = file.name.removesuffix(".yaml")
            found[name] = documents.parse(file.read_text(), ProfileDocument, name=file.name).profile(name)
    return found


def profile(name: str) -> Profile:
    """The shipped profile of this name, or that of a file (`*.yaml`).

    Raises StepTimeError for an unknown name, DocumentError for a file that can't be read.
    """
    if name.endswith((".yaml", ".yml")):
        return documents.load(Path(name), ProfileDocument).profile(Path(name).stem)
    known = profiles()
    if name not in known:
        raise StepTimeError(
            f"no step time profile {name!r}: choose one of {', '.join(sorted(known))}, or a file that ends in .yaml"
        )
    return known[name]


def _samples(table: dict[str, Any]) -> Iterator[StepSample]:
    """Rows of the YAML table as samples; a time to first token covers all chunks of its prompt."""
    for prompt_tokens, cached_tokens, milliseconds in table["ttft_ms"]:
        work = prefill_work(prompt_tokens, cached_tokens, table["max_num_batched_tokens"])
        yield StepSample(work, milliseconds / 1000)
    for sequences, context_tokens, milliseconds in table["decode_ms"]:
        work = StepWork(decode_sequences=sequences, context_tokens=sequences * context_tokens)
        yield StepSample(work, milliseconds / 1000)
