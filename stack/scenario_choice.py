"""Which scenario a command runs: a shipped one, a file, or the replay of a recording; and what to say of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadgen.planner import recording_of
from loadgen.run_figures import closed_loop_note
from loadgen.scenario import Scenario, load_scenario
from stack.errors import UsageError

REPLAY_SCENARIO = "replay"


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """`--trace` and what goes with it; None stands for the scenario's own value."""

    file: Path
    format: str | None = None
    speed: float | None = None
    limit: int | None = None
    answers: str | None = None


def trace_options(
    file: Path | None, format_: str | None, speed: float | None, limit: int | None, answers: str | None
) -> TraceOptions | None:
    """What the options say of a recording; None without one. Raises UsageError for options that need one."""
    given = {"--format": format_, "--speed": speed, "--limit": limit, "--answers": answers}
    if file is not None:
        return TraceOptions(file, format_, speed, limit, answers)
    if alone := [name for name, value in given.items() if value is not None]:
        raise UsageError(f"{' and '.join(alone)}: only with --trace FILE; a scenario says such things in its file")
    return None


def chosen_scenario(
    name: str | None, trace: TraceOptions | None = None, duration_seconds: float | None = None
) -> Scenario:
    """The scenario named, replaying this recording, of this length. Raises UsageError or DocumentError."""
    if name is None and trace is None:
        raise UsageError(
            "give a scenario or a recording: prefixwatch bench SCENARIO (`prefixwatch scenarios` lists them), or "
            "--trace FILE"
        )
    scenario = load_scenario(name or REPLAY_SCENARIO)
    if trace is not None:
        scenario = _replaying(scenario, trace)
    if duration_seconds is not None:
        scenario = _of_length(scenario, duration_seconds)
    if scenario.replay is not None:
        recording_of(scenario)  # told here, rather than by the process that will send it
    return scenario


def scenario_notes(scenario: Scenario) -> Iterator[str]:
    """What a reader of the results should know of how the traffic is made."""
    if scenario.arrivals is not None and scenario.arrivals.closed:
        assert scenario.arrivals.concurrency is not None
        note = closed_loop_note(scenario.arrivals.concurrency)
        yield f"{note[0].upper()}{note[1:]}."
    if scenario.replay is not None:
        recording = recording_of(scenario)
        until_s = scenario.duration_seconds * scenario.replay.speed
        due = sum(r.arrival_s is not None and r.arrival_s < until_s for r in recording.requests)
        answers = "as recorded" if scenario.replay.answers == "recorded" else "as generated in this run"
        yield (
            f"Replaying {due} of {len(recording.requests)} requests of {recording.file} ({recording.format}): "
            f"the first {scenario.duration_seconds:g} s (--duration) at {scenario.replay.speed:g} times the recorded "
            f"speed (--speed); answers of earlier turns {answers}."
        )


def _of_length(scenario: Scenario, duration_seconds: float) -> Scenario:
    trimmed = scenario.warm_up_seconds + scenario.cool_down_seconds
    if trimmed >= duration_seconds:
        raise UsageError(
            f"--duration {duration_seconds:g}: the scenario's warm-up and cool-down take {trimmed:g} s of it and leave "
            f"nothing to measure: make it longer"
        )
    return scenario.model_copy(update={"duration_seconds": duration_seconds})


def _replaying(scenario: Scenario, trace: TraceOptions) -> Scenario:
    if scenario.replay is None:
        raise UsageError(
            f"--trace: scenario {scenario.name} draws its own requests: leave it out, or give one with replay in it"
        )
    given = {"format": trace.format, "speed": trace.speed, "limit": trace.limit, "answers": trace.answers}
    if trace.answers not in (None, "recorded", "generated"):
        raise UsageError(f"--answers {trace.answers}: choose recorded or generated")
    update = {key: value for key, value in given.items() if value is not None}
    replay = scenario.replay.model_copy(update={"file": trace.file.absolute(), **update})
    return scenario.model_copy(update={"replay": replay})
