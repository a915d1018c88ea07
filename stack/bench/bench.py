"""The main job: engines, a router per policy, the same traffic for each, grades, a comparison, a report.

Every policy of a repeat gets the byte-identical plan; caches are emptied and the router is a fresh process
before each run, so that no run profits from another. Runs are interleaved (`stack.bench.schedule`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from prefixwatch.documents.errors import InputError
from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.loadgen.report.levels import write_levels_report
from prefixwatch.loadgen.request_log.fleet_rows import FleetRow
from prefixwatch.loadgen.request_log.records import RequestRecord, read_requests
from prefixwatch.loadgen.results.run_folder import TARGET
from prefixwatch.loadgen.scenario.model import Scenario
from prefixwatch.loadgen.sending.run_config import RunConfig
from prefixwatch.slo.build import load_objectives
from prefixwatch.slo.objective import RequestField
from prefixwatch.stack.bench.bench_fleet import BenchFleet, nobody
from prefixwatch.stack.bench.levels import LevelRun, LevelsRequest, run_levels, write_levels
from prefixwatch.stack.bench.load_process import send_load
from prefixwatch.stack.bench.options import (
    BenchOptions,
    check_cache,
    check_calibrate,
    check_outputs,
    model_dir_of,
    specs_of,
    tune_of,
)
from prefixwatch.stack.bench.progress import Progress
from prefixwatch.stack.bench.results import BenchRuns, options_document, versions, write_results
from prefixwatch.stack.bench.scenario_choice import (
    chosen_scenario,
    scenario_notes,
)
from prefixwatch.stack.bench.schedule import Run, interleaved, session_suffix
from prefixwatch.stack.bench.tuned import write_tuned
from prefixwatch.stack.bench.watching.exporter_log import ExporterLog
from prefixwatch.stack.bench.watching.fleet_log import FleetLog
from prefixwatch.stack.bench.watching.grafana_mark import GrafanaMark
from prefixwatch.stack.bench.watching.prometheus_log import PrometheusLog
from prefixwatch.stack.bench.watching.run_metrics import RunMetrics
from prefixwatch.stack.cli.command import command, finish, new_app, plain_console
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.interrupt import Interrupt, StoppedError
from prefixwatch.stack.local.out_folder import NOT_WRITTEN, file_name, make_out_folder
from prefixwatch.stack.simulation.constants import SECONDS, Constants, calibrated, constants_note, fit_constants

TARGET_LABEL = "target"
CALIBRATION = "calibration"
"""The run before the graded ones; its log is kept."""
_LAG_SHARE = 0.05
"""A client lateness beyond this share of the tightest TTFT threshold makes a run invalid."""


app = new_app()


def run_bench(options: BenchOptions, console: Console) -> tuple[dict[str, Any], int]:
    """Run a bench; returns the content of summary.json (of levels.json) and the exit code. Raises one of
    InputError, or KeyboardInterrupt when the user ended it before there was anything to keep."""
    bench = _Bench(options, console)
    try:
        return asyncio.run(bench.run() if bench.levels is None else bench.run_levels(bench.levels))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    except OSError as error:
        if error.errno not in NOT_WRITTEN:
            raise
        raise UsageError(
            f"--out {options.out}: can't be written to ({error.strerror}): the logs of the runs that were made are in "
            f"{options.out / 'logs'}; make room, or choose another folder"
        ) from error


class _Bench:
    def __init__(self, options: BenchOptions, console: Console) -> None:
        self.options = options
        self.console = console
        self.scenario = chosen_scenario(options.scenario, options.recording, options.duration)
        check_cache(options, self.scenario)
        self.levels = options.levels
        self.objectives = load_objectives(self.scenario.slo)
        self.tune = tune_of(options)
        self.specs = specs_of(options, self.tune)
        self.repeats = options.repeats + (self.tune is not None)  # the last one takes no part in the choice
        self.policies = [TARGET_LABEL] if options.target else list(self.specs)
        self.model_dir = model_dir_of(options)
        self.fleet = BenchFleet(options, self.scenario, console, self.model_dir)
        check_outputs(options)
        check_calibrate(options, self.scenario)
        self.constants: Constants | None = None
        self.metrics = RunMetrics(self.scenario.name)
        self.logs = make_out_folder(options.out) / "logs"
        self.interrupt = Interrupt(console)

    async def run(self) -> tuple[dict[str, Any], int]:
        for line in scenario_notes(self.scenario):
            self.console.print(line, soft_wrap=True, highlight=False)
        scenario_file = self._write_scenario(self.scenario)
        runs = BenchRuns(
            scenario=self.scenario,
            objectives=self.objectives,
            engine=TARGET if self.options.target else self.options.engine,
            workers=self.fleet.workers,
            policies=self.policies,
            seed=self.options.seed,
            again=self._again(),
            events=self.fleet.plan,
        )
        with self.interrupt.heard():
            async with self._engines() as engines:
                if engines:
                    runs.block_size = engines[0].block_size
                if self.options.calibrate:
                    runs.notes.append(await self._calibrate(engines))
                    runs.again = self._again()
                with Progress(self.console, len(self.policies) * self.repeats) as progress:
                    failure = await self._make_runs(engines, scenario_file, runs, progress)
        result = write_results(self.options.out, runs, self.console)
        if failure is not None:
            raise failure
        if self.tune is not None and runs.incomplete is None:
            return write_tuned(self.options.out, self.tune, runs, result, self.console)
        return result

    async def _calibrate(self, engines: list[EngineHandle]) -> str:
        """Give the policies their constants; returns what to say of that. Raises UsageError."""
        with self.console.status("calibrating: the first minute's requests, one after another …"):
            duration = min(SECONDS, self.scenario.duration_seconds)
            whole = {"warm_up_seconds": 0.0, "cool_down_seconds": 0.0, "prime": False, "duration_seconds": duration}
            alone = self.scenario if self.scenario.replay is not None else self.scenario.at_concurrency(1)
            file = self._write_scenario(alone.model_copy(update=whole), "calibration.yaml")
            specs, self.specs = self.specs, {CALIBRATION: "round_robin"}
            records, *_ = await self._make_run(engines, Run(0, CALIBRATION, 0), file, secrets.token_hex(6))
        self.constants = fit_constants(records)
        self.specs = calibrated(specs, self.constants)
        note = constants_note(self.constants, of_target=self.fleet.endpoint is not None)
        self.console.print(f"Note: {note}", soft_wrap=True, highlight=False)
        return note

    async def _make_runs(
        self, engines: list[EngineHandle], scenario_file: Path, runs: BenchRuns, progress: Progress
    ) -> Exception | None:
        """All runs, or those up to an interrupt or a failure, which is answered, for what was measured is to be kept.

        Raises the failure if there is nothing to keep, KeyboardInterrupt if nothing was made before the user ended it.
        """
        nonces = [secrets.token_hex(6) for _ in range(self.repeats)]
        planned = interleaved(self.policies, self.repeats)
        failure: Exception | None = None
        try:
            for run in planned:
                if self.interrupt.asked:
                    break
                progress.begin(run)
                # A target's caches can't be emptied, so there each run has prompts of its own.
                nonce = nonces[run.repeat] if engines else secrets.token_hex(6)
                records, report, rows = await self._make_run(engines, run, scenario_file, nonce, progress.update)
                runs.add(run, records, report, rows)
                progress.end(report)
        except StoppedError as stopped:
            if not runs.reports:
                raise KeyboardInterrupt from stopped
        except InputError as error:
            if not runs.reports:
                raise
            failure = error
        made = f"{len(runs.reports)} of {len(planned)} runs were made"
        if failure is not None:
            runs.incomplete = f"{made}, then: {failure}"
        elif self.interrupt.asked:
            runs.incomplete = f"stopped by hand: {made}, the last one perhaps in part"
        return failure

    async def _make_run(
        self,
        engines: list[EngineHandle],
        run: Run,
        scenario_file: Path,
        nonce: str,
        on_progress: Callable[[dict[str, Any]], None] = lambda progress: None,
    ) -> tuple[list[RequestRecord], dict[str, Any], list[FleetRow]]:
        """The run's request log, its run.json, and what the fleet did meanwhile."""
        folder = self.logs / f"{run.position:02d}-{file_name(run.policy)}-{run.repeat}"
        async with (
            self.fleet.endpoint_of(run, self.specs.get(run.policy, ""), engines, folder) as (url, model, heard),
            self._fleet_log(engines, run) as rows,
            self._mark(run) as ended,
        ):
            config = RunConfig(
                target=url,
                scenario=str(scenario_file),
                model_dir=self.model_dir,
                tokenize_url=self.options.tokenize_url or "",
                approximate_prompts=self.options.approximate_prompts,
                model=model,
                seed=self.options.seed + run.repeat,
                nonce=nonce,
                session_suffix=session_suffix(run, own_engines=bool(engines), live=self.options.live),
                policy=run.policy,
                repeat=run.repeat,
                out=folder,
                lag_limit_ms=self._lag_limit_ms(),
                api_key_env=self.options.api_key_env,
                processes=self.options.processes,
                locust_master=self.options.locust_master,
            )
            ca_file = self.options.ca_file

            def show(progress: dict[str, Any]) -> None:
                heard(progress)
                on_progress(progress)
                self.metrics.update(run, progress)

            report = await send_load(config, folder, show, interrupt=self.interrupt, ca_file=ca_file)
            self.metrics.update(run, {**report["counts"], "in_flight": 0})
            ended(report)
        self.fleet.check(engines)
        return list(read_requests(folder / "requests.parquet")), report, rows

    def _mark(self, run: Run) -> AbstractAsyncContextManager[Callable[[dict[str, Any]], None]]:
        if self.options.grafana is None:
            return contextlib.nullcontext(nobody)
        token_env, say = self.options.grafana_token_env, partial(self.console.print, soft_wrap=True, highlight=False)
        return GrafanaMark(self.options.grafana, token_env, self.scenario.name, say).around(run)

    def _fleet_log(self, engines: list[EngineHandle], run: Run) -> AbstractAsyncContextManager[list[FleetRow]]:
        if self.options.exporter is not None:
            return ExporterLog.following(self.options.exporter, run)
        if self.options.prometheus is not None:
            return PrometheusLog.following(self.options.prometheus, self.options.prometheus_match, run)
        return FleetLog.following(engines, run)

    async def run_levels(self, request: LevelsRequest) -> tuple[dict[str, Any], int]:
        """Sweep or search: many runs, each at a level of its own."""
        positions = itertools.count(1)
        with self.interrupt.heard():
            async with self._engines() as engines:

                async def run_level(scenario: Scenario, policy: str, repeat: int) -> LevelRun:
                    run = Run(next(positions), policy, repeat)
                    file = self._write_scenario(scenario)
                    records, report, _ = await self._make_run(engines, run, file, secrets.token_hex(6))
                    return LevelRun(records, report["reasons"])

                found, code = await run_levels(
                    self.scenario,
                    self.objectives,
                    self.policies,
                    request,
                    run=run_level,
                    console=self.console,
                    block_size=engines[0].block_size if engines else DEFAULT_BLOCK_SIZE,
                    interrupt=self.interrupt,
                )
        write_levels(self.options.out, found)
        report = self.options.out / "report.html"
        write_levels_report(report, found, code, {**self._again(), "versions": versions()})
        self.console.print(f"Report: {report}", soft_wrap=True, highlight=False)
        return found, code

    def _write_scenario(self, scenario: Scenario, name: str = "scenario.yaml") -> Path:
        file = self.options.out / name
        content = scenario.model_dump(mode="json", exclude_unset=True)
        file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return file

    @contextlib.asynccontextmanager
    async def _engines(self) -> AsyncIterator[list[EngineHandle]]:
        async with self.metrics.shown(self.options.metrics_listen, self.options.otlp), self.fleet.started() as engines:
            yield engines

    def _again(self) -> dict[str, Any]:
        """What a second bench needs to repeat this one."""
        found = {
            "options": options_document(self.options),
            "scenario": self.scenario.model_dump(mode="json", exclude_unset=True),
        }
        if self.constants is not None:
            found["calibrated"] = {**self.constants.document(), "policies": dict(self.specs)}
        return found

    def _lag_limit_ms(self) -> float:
        thresholds = [t for o in self.objectives for t in o.thresholds(RequestField.TTFT_SECONDS)]
        return 1000.0 * _LAG_SHARE * min(thresholds, default=0.5)


@command(app, "bench")
def bench(options: BenchOptions) -> None:
    """Start engines and a router, send a scenario under each policy, grade, compare and report.

    Example: `prefixwatch bench shared-prefix --engine vllm --workers 2 --policy round_robin,cache_aware`

    Example: `prefixwatch bench --trace conversation_trace.jsonl --speed 0.1 --policy score`

    Example: `prefixwatch bench shared-prefix --search-rate --policy score`

    Writes summary.json, summary.md, requests.parquet, fleet.parquet, report.html, junit.xml and config.yaml to --out.
    """
    finish(*run_bench(options, plain_console(stderr=options.as_json)), as_json=options.as_json)
