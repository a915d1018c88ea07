"""The main job: engines, a router per policy, the same traffic for each, grades, a comparison, a report.

Every policy of a repeat gets the byte-identical plan; caches are emptied and the router is a fresh process
before each run, so that no run profits from another. Runs are interleaved (`stack.schedule`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from engines import fleet
from engines.fleet import EngineHandle
from engines.process import free_port
from engines.tiny_model import default_model_dir
from kvcache.blocks import DEFAULT_BLOCK_SIZE
from kvcache.tokenizer import Tokenizer
from loadgen.fleet_rows import FleetRow
from loadgen.levels_report import write_levels_report
from loadgen.records import RequestRecord, read_requests
from loadgen.run_config import RunConfig
from loadgen.scenario import Scenario
from router.config import CacheViewConfig, PolicyConfig, RouterConfig, TenantsConfig
from slo.document import load_objectives
from slo.objective import RequestField
from stack.config import PrefixwatchConfig
from stack.errors import INPUT_ERRORS, UsageError
from stack.fleet import as_workers, start_engines, start_router
from stack.fleet_log import FleetLog
from stack.interrupt import Interrupt, StoppedError
from stack.load_levels import LevelRun, LevelsRequest, run_levels, write_levels
from stack.load_process import send_load
from stack.options import check_policies
from stack.out_folder import NOT_WRITTEN, make_out_folder
from stack.progress import Progress
from stack.results import BenchRuns, versions, write_results
from stack.scenario_choice import TraceOptions, chosen_scenario, scenario_notes
from stack.schedule import Run, interleaved
from stack.targets import Endpoint, check_served_tokenizer, check_tokenizer, served_model
from stack.up import start_exporter

TARGET_LABEL = "target"
_LAG_SHARE = 0.05
"""A client lateness beyond this share of the tightest TTFT threshold makes a run invalid."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of `prefixwatch bench`, as given; None stands for the scenario's own value."""

    scenario: str | None
    engine: str = "simulated"
    workers: int | None = None
    policies: list[str] = field(default_factory=lambda: ["round_robin", "cache_aware"])
    target: str | None = None
    model_dir: Path | None = None
    """Of a target: the served model's; None: its /tokenize is asked."""
    tokenize_url: str | None = None
    """Engine to ask instead of the target, which may be a gateway that has no /tokenize."""
    model: str | None = None
    """To ask a target for; None: the first that it lists."""
    api_key_env: str = ""
    """Environment variable with the target's API key."""
    ca_file: Path | None = None
    repeats: int = 3
    seed: int = 1
    duration_seconds: float | None = None
    out: Path = Path("results/latest")
    trace: TraceOptions | None = None
    live: bool = False
    """An exporter watches, so that its live page can be looked at."""
    levels: LevelsRequest | None = None
    """Sweep or search, instead of comparing policies at one load."""


def run_bench(options: BenchOptions, console: Console) -> tuple[dict[str, Any], int]:
    """Run a bench; answers the content of summary.json (of levels.json) and the exit code. Raises one of
    INPUT_ERRORS, or KeyboardInterrupt when the user ended it before there was anything to keep."""
    bench = _Bench(options, console)
    try:
        return asyncio.run(bench.run() if options.levels is None else bench.run_levels(options.levels))
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
        self.scenario = chosen_scenario(options.scenario, options.trace, options.duration_seconds)
        self.objectives = load_objectives(self.scenario.slo)
        self.policies = [TARGET_LABEL] if options.target else check_policies(options.policies)
        self.model_dir = _model_dir(options)
        self.endpoint = _endpoint(options)
        hinted = None if self.endpoint is not None else self.scenario.engine.workers or 4
        self.workers = options.workers or hinted
        if options.live and options.target:
            raise UsageError(
                "--live watches the engines that a bench starts; with --target run `prefixwatch exporter` beside it"
            )
        self.router_port = free_port() if options.live else None
        """The same for all runs where an exporter scrapes it."""
        self.logs = make_out_folder(options.out) / "logs"
        self.interrupt = Interrupt(console)

    async def run(self) -> tuple[dict[str, Any], int]:
        for line in scenario_notes(self.scenario):
            self.console.print(line, soft_wrap=True, highlight=False)
        scenario_file = self._write_scenario(self.scenario)
        runs = BenchRuns(
            scenario=self.scenario,
            objectives=self.objectives,
            engine="target" if self.options.target else self.options.engine,
            workers=self.workers,
            policies=self.policies,
            seed=self.options.seed,
            again=self._again(),
        )
        with self.interrupt.heard():
            async with self._engines() as engines:
                if engines:
                    runs.block_size = engines[0].block_size
                with Progress(self.console, len(self.policies) * self.options.repeats) as progress:
                    failure = await self._make_runs(engines, scenario_file, runs, progress)
        result = write_results(self.options.out, runs, self.console)
        if failure is not None:
            raise failure
        return result

    async def _make_runs(
        self, engines: list[EngineHandle], scenario_file: Path, runs: BenchRuns, progress: Progress
    ) -> Exception | None:
        """All runs, or those up to an interrupt or a failure, which is answered, for what was measured is to be kept.

        Raises the failure if there is nothing to keep, KeyboardInterrupt if nothing was made before the user ended it.
        """
        nonces = [secrets.token_hex(6) for _ in range(self.options.repeats)]
        planned = interleaved(self.policies, self.options.repeats)
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
        except INPUT_ERRORS as error:
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
        folder = self.logs / f"{run.position:02d}-{run.policy}-{run.repeat}"
        async with self._endpoint(run, engines, folder) as (url, model), FleetLog.following(engines, run) as rows:
            config = RunConfig(
                target=url,
                scenario=str(scenario_file),
                model_dir=self.model_dir,
                tokenize_url=self.options.tokenize_url or "",
                model=model,
                seed=self.options.seed + run.repeat,
                nonce=nonce,
                policy=run.policy,
                repeat=run.repeat,
                out=folder,
                lag_limit_ms=self._lag_limit_ms(),
                api_key_env=self.options.api_key_env,
            )
            ca_file = self.options.ca_file
            report = await send_load(config, folder, on_progress, interrupt=self.interrupt, ca_file=ca_file)
        for engine in engines:
            engine.process.check()
        return list(read_requests(folder / "requests.parquet")), report, rows

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

    def _write_scenario(self, scenario: Scenario) -> Path:
        file = self.options.out / "scenario.yaml"
        content = scenario.model_dump(mode="json", exclude_unset=True)
        file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return file

    @contextlib.asynccontextmanager
    async def _engines(self) -> AsyncIterator[list[EngineHandle]]:
        if self.endpoint is not None:
            yield []
            return
        assert self.workers is not None
        hints = self.scenario.engine
        simulated = {"profile": hints.profile, "max_model_len": hints.max_model_len, "seed": self.options.seed}
        with self.console.status(f"starting {self.workers} {self.options.engine} engines …"):
            engines = await start_engines(
                self.options.engine,
                self.workers,
                self.logs,
                self.model_dir,
                {
                    "capacity_blocks": hints.capacity_blocks,
                    **(simulated if self.options.engine == "simulated" else {"seed": self.options.seed}),
                },
            )
        try:
            async with self._live_page(engines):
                yield engines
        finally:
            await fleet.stop(engines)

    @contextlib.asynccontextmanager
    async def _live_page(self, engines: list[EngineHandle]) -> AsyncIterator[None]:
        if self.router_port is None:
            yield
            return
        config = PrefixwatchConfig.model_validate({"exporter": {"listen": f"127.0.0.1:{free_port()}"}})
        router_url = f"http://127.0.0.1:{self.router_port}"
        exporter = await start_exporter(config, as_workers(engines), router_url, self.logs)
        self.console.print(f"live page: http://{config.exporter.listen}/", soft_wrap=True, highlight=False)
        try:
            yield
        finally:
            await asyncio.to_thread(exporter.stop)

    @contextlib.asynccontextmanager
    async def _endpoint(self, run: Run, engines: list[EngineHandle], folder: Path) -> AsyncIterator[tuple[str, str]]:
        """The address to send to and the model to ask for: the target, or a fresh router over emptied caches."""
        if self.endpoint is not None:
            model = await served_model(self.endpoint, self.options.model)
            if self.model_dir is not None:
                await check_tokenizer(self.endpoint, model, self.model_dir)
            else:
                await asyncio.to_thread(check_served_tokenizer, self.endpoint, model, self.options.tokenize_url)
            yield self.endpoint.url, model
            return
        await fleet.reset_caches(engines)
        config = RouterConfig(
            port=self.router_port or free_port(),
            workers=as_workers(engines),
            policy=PolicyConfig(name=run.policy, seed=self.options.seed + run.repeat),
            model_dir=self.model_dir,
            block_size=engines[0].block_size,
            cache_view=CacheViewConfig(source="events"),
            always_predict=True,
            tenants=TenantsConfig(trust_client_salt=True),
        )
        router = await start_router(config, folder)
        try:
            yield f"http://{config.host}:{config.port}", engines[0].model
        finally:
            await asyncio.to_thread(router.stop)

    def _again(self) -> dict[str, Any]:
        """What a second bench needs to repeat this one."""
        given = json.loads(json.dumps(asdict(self.options), default=str))  # paths as texts
        return {"options": given, "scenario": self.scenario.model_dump(mode="json", exclude_unset=True)}

    def _lag_limit_ms(self) -> float:
        thresholds = [t for o in self.objectives for t in o.thresholds(RequestField.TTFT_SECONDS)]
        return 1000.0 * _LAG_SHARE * min(thresholds, default=0.5)


def _endpoint(options: BenchOptions) -> Endpoint | None:
    """The target, if the bench has one. Raises UsageError for options that need one."""
    if options.target is not None:
        return Endpoint(options.target, options.api_key_env, options.ca_file)
    given = {"--model": options.model, "--api-key-env": options.api_key_env, "--ca-file": options.ca_file}
    if alone := [name for name, value in given.items() if value]:
        raise UsageError(f"{' and '.join(alone)}: only with --target; engines that a bench starts need none")
    return None


def _model_dir(options: BenchOptions) -> Path | None:
    """None for a target whose /tokenize is asked. Raises UsageError, TokenizerError."""
    if options.tokenize_url and (options.model_dir is not None or not options.target):
        raise UsageError("--tokenize-url goes with --target, and without --model-dir: take one out")
    if options.model_dir is None and options.target:
        return None
    folder = options.model_dir or default_model_dir()
    Tokenizer(folder)  # told here, rather than by every process that will need it
    return folder
