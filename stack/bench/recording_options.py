"""The options that say how to read a recording: the same ones in `bench`, `simulate`, `plan` and `analyze`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from prefixwatch.loadgen.recordings.reader import read_recording
from prefixwatch.loadgen.recordings.request import Recording
from prefixwatch.stack.cli.command import load_option
from prefixwatch.stack.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    """How to read a recording, and which part of it."""

    format: Annotated[str | None, load_option(help="Of a recording: its format; default: detected.")] = None
    time_unit: Annotated[
        str | None, load_option(help="Of a trace: unit of its time stamps (s, ms, us, ns); default: its dialect's.")
    ] = None
    trace_block_size: Annotated[
        int | None, load_option(min=1, help="Of a trace: tokens per block id; default: detected from the rows.")
    ] = None
    rate: Annotated[
        float | None,
        load_option(
            min=0.001,
            help="Of a recording: begin its sessions at this mean rate per second, in place of its times; for files "
            "without times.",
        ),
    ] = None
    limit: Annotated[int | None, load_option(min=1, help="Of a recording: only the first requests.")] = None
    from_seconds: Annotated[
        float | None, load_option("--from", min=0, help="Of a recording: only from this second on.")
    ] = None
    until_seconds: Annotated[
        float | None, load_option("--until", min=0.001, help="Of a recording: only before this second.")
    ] = None

    def read(self, file: Path) -> Recording:
        """The recording, or the part of it that these options name. Raises DocumentError."""
        recording = read_recording(
            file, self.format, self.limit, time_unit=self.time_unit, block_tokens=self.trace_block_size
        ).between(self.from_seconds, self.until_seconds)
        return recording if self.rate is None else recording.at_rate(self.rate)

    def chosen(self) -> dict[str, str | int | float]:
        """The options given, as they are on the command line."""
        names = {"from_seconds": "--from", "until_seconds": "--until"}
        values = {field.name: getattr(self, field.name) for field in fields(RecordingOptions)}
        return {
            names.get(name, f"--{name.replace('_', '-')}"): value for name, value in values.items() if value is not None
        }


def check_speed(speed: float) -> None:
    """Raise UsageError for a speed at which a recording would take ages, or no time."""
    if not 0.001 <= speed <= 1_000_000:
        raise UsageError(f"--speed must be a number above 0, from 0.001 to 1,000,000, got {speed:g}")


def is_scenario(source: str, shipped: list[str]) -> bool:
    """Whether a command's argument names a scenario; anything else is the file of a recording. Raises UsageError."""
    if source in shipped or source.endswith((".yaml", ".yml")):
        return True
    if not Path(source).exists():
        raise UsageError(
            f"{source}: no such recording, and no such scenario: give a file, or one of {', '.join(shipped)}"
        )
    return False


def refuse_for_scenario(source: str, options: RecordingOptions, *besides: str) -> None:
    """Raise UsageError where options of a recording are given for a scenario."""
    if given := [*options.chosen(), *besides]:
        raise UsageError(
            f"{' and '.join(given)}: only of a recording; {source} is a scenario, which has them in its file"
        )
