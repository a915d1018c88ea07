"""What a command runs: a scenario by name or file, or the replay of a recording; and under which policies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from prefixwatch.loadgen.grading.run_figures import closed_loop_note
from prefixwatch.loadgen.plan.planner import recording_of
from prefixwatch.loadgen.recordings.request import Recording
from prefixwatch.loadgen.scenario.model import Scenario, load_scenario
from prefixwatch.router.policies import make_policy
from prefixwatch.router.policies.spec import parse_spec, read_variants, split
from prefixwatch.stack.bench.recording_options import RecordingOptions
from prefixwatch.stack.errors import UsageError

REPLAY_SCENARIO = "replay"


@dataclass(frozen=True, slots=True)
class TraceOptions(RecordingOptions):
    """`--trace` and what goes with it; None stands for the scenario's own value."""

    file: Path
    speed: float | None = None
    answers: str | None = None


def trace_options(
    file: Path | None, speed: float | None, answers: str | None, recording: RecordingOptions
) -> TraceOptions | None:
    """What the options say of a recording; None without one. Raises UsageError for options that need one."""
    if file is not None:
        own = {field.name: getattr(recording, field.name) for field in fields(RecordingOptions)}
        return TraceOptions(file, speed=speed, answers=answers, **own)
    also = {"--speed": speed, "--answers": answers}
    if alone := [*recording.chosen(), *(name for name, value in also.items() if value is not None)]:
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
        _check_times(recording_of(scenario), scenario)  # here, rather than in the process that will send it
    return scenario


def _check_times(recording: Recording, scenario: Scenario) -> None:
    """Raise UsageError for a request without a time, or when none is due while the scenario lasts."""
    assert scenario.replay is not None
    if untimed := next((request for request in recording.requests if request.arrival_s is None), None):
        raise UsageError(
            f"{untimed.where}: has no time: a replay sends each request at its own; add timestamp, in Unix seconds or "
            "ISO 8601, or give --rate"
        )
    until_s = scenario.duration_seconds * scenario.replay.speed
    if not any(request.arrival_s is not None and request.arrival_s < until_s for request in recording.requests):
        raise UsageError(f"{recording.file}: no request is due in the first {until_s:g} s: make --duration longer")


def check_fleet_options(scenario: Scenario, workers: int | None) -> None:
    """Raise UsageError where `--workers` doesn't go with the scenario's fleet, or its events don't fit the workers."""
    if scenario.fleet and workers is not None:
        raise UsageError(f"--workers: scenario {scenario.name} lists its workers under fleet: leave the option out")
    try:
        scenario.event_plan(workers)
    except ValueError as error:
        raise UsageError(f"scenario {scenario.name}: {error}") from error


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
        yield from recording.notes


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
    same = ("format", "time_unit", "limit", "from_seconds", "until_seconds", "speed", "answers")
    given = {name: getattr(trace, name) for name in same}
    given |= {"block_tokens": trace.trace_block_size, "rate_per_second": trace.rate}
    if trace.answers not in (None, "recorded", "generated"):
        raise UsageError(f"--answers {trace.answers}: choose recorded or generated")
    update = {key: value for key, value in given.items() if value is not None}
    replay = scenario.replay.model_copy(update={"file": trace.file.absolute(), **update})
    return scenario.model_copy(update={"replay": replay})


DEFAULT_POLICIES = "round_robin,cache_aware"
POLICY_HELP = (
    "Routing policies, comma-separated, with options if wanted: 'score,loadaware{beta=0.5}'; or a YAML file of named "
    "variants. `prefixwatch policies` lists them."
)


def chosen_policies(given: str, option: str = "--policy") -> dict[str, str]:
    """The policies that an option names: what results call each, and its spec for `make_policy`.

    A name that ends in .yaml stands for all variants in that file. Raises UsageError for none, for one named twice,
    for an unknown policy, and for an option that a policy doesn't have; DocumentError for the file.
    """
    found: dict[str, str] = {}
    for part in split(given):
        try:
            specs = read_variants(Path(part)) if part.endswith((".yaml", ".yml")) else [parse_spec(part)]
            for spec in specs:
                if spec.label in found:
                    raise UsageError(f"{option} names '{spec.label}' twice")
                make_policy(spec.text)
                found[spec.label] = spec.text
        except ValueError as error:
            raise UsageError(f"{option}: {error}") from error
    if not found:
        raise UsageError(f"{option} names no policy: give one or more, separated by commas")
    return found
