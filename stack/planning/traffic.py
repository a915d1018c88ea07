"""What a plan is made for: a scenario, a recording, or the requests that an exporter has seen."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from prefixwatch.documents.errors import InputError
from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.loadgen.scenario.model import load_scenario, shipped_scenarios
from prefixwatch.simulator.traffic.scenario_traffic import ScenarioTraffic
from prefixwatch.simulator.traffic.trace import SimulatedRequest, Trace, simulated
from prefixwatch.stack.bench.recording_options import RecordingOptions, check_speed, is_scenario, refuse_for_scenario
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.access import check_address
from prefixwatch.stack.traffic.trace import ExportOptions, run_export

SCENARIO_SEED = 1


@dataclass(frozen=True, slots=True)
class PlannedTraffic:
    """Requests in order of arrival."""

    name: str
    requests: list[SimulatedRequest]
    block_size: int
    notes: Sequence[str] = ()

    @property
    def seconds(self) -> float:
        """From the first arrival to the last one."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s


def planned_traffic(source: str, recording: RecordingOptions, speed: float, model_dir: Path | None) -> PlannedTraffic:
    """`source` is a scenario, a recording's file, or an exporter's URL. Raises UsageError, DocumentError."""
    check_speed(speed)
    if _is_exporter(source):
        check_address("plan", source, logins=True)
        if model_dir is not None:
            raise UsageError("--model-dir: live requests have no texts to tokenize: leave it out")
        trace, notes = _live(source, recording)
        found = _at_speed(source, trace, speed, [*notes, *trace.notes])
    elif is_scenario(source, shipped_scenarios()):
        besides = {"--speed": speed != 1.0, "--model-dir": model_dir is not None}
        refuse_for_scenario(source, recording, *(name for name, given in besides.items() if given))
        scenario = load_scenario(source)
        requests = ScenarioTraffic(scenario).requests(seed=SCENARIO_SEED)
        found = PlannedTraffic(scenario.name, requests, scenario.engine.block_size or DEFAULT_BLOCK_SIZE)
    else:
        trace = simulated(recording.read(Path(source)), model_dir)
        found = _at_speed(Path(source).name, trace, speed, trace.notes)
    if len({request.arrival_s for request in found.requests}) < 2:
        count = len(found.requests)
        what = "only one request" if count == 1 else f"{count:,} requests that all arrive at once"
        raise UsageError(f"{source}: has {what}, and a plan needs some at different times: {_more(source)}")
    return found


def _is_exporter(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def _more(source: str) -> str:
    if _is_exporter(source):
        return "send more traffic, and plan again"
    if is_scenario(source, shipped_scenarios()):
        return "give it arrivals with a rate, or a longer duration_seconds"
    return "give a longer recording, or --rate"


def _at_speed(name: str, trace: Trace, speed: float, notes: Sequence[str]) -> PlannedTraffic:
    if not trace.timed:
        raise UsageError(f"{name}: not every request has a time: give --rate")
    requests = [replace(request, arrival_s=request.arrival_s / speed) for request in trace.requests]
    return PlannedTraffic(name, requests, trace.block_size, notes)


def _live(exporter: str, recording: RecordingOptions) -> tuple[Trace, list[str]]:
    """The requests that an exporter keeps, and what is missing in them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.jsonl"
        held = run_export(ExportOptions(exporter=exporter, out=file), Console(quiet=True))
        try:
            trace = simulated(recording.read(file))
        except InputError as error:  # nobody has this file
            raise UsageError(str(error).replace(str(file), exporter)) from error
    lacking = {
        "without_blocks": "have no block marks and count as sharing nothing",
        "without_length": "were left out: the length of their prompts is unknown",
    }
    return trace, [f"{held[key]:,} live requests {text}." for key, text in lacking.items() if held[key]]
