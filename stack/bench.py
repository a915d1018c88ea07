"""The main job: engines, a router per policy, the same traffic for each, grades, a comparison, a report.

Every policy of a repeat gets the byte-identical plan; caches are emptied and the router is a fresh process
before each run, so that no run profits from another. Runs are interleaved (`stack.schedule`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from engines import fleet
from engines.fleet import EngineHandle
from engines.process import free_port
from engines.tiny_model import default_model_dir
from kvcache.tokenizer import Tokenizer
from loadgen.records import read_requests
from loadgen.run_config import RunConfig
from loadgen.scenario import Scenario, load_scenario
from router.config import CacheViewConfig, PolicyConfig, RouterConfig, TenantsConfig
from slo.document import load_objectives
from slo.objective import RequestField
from stack.errors import UsageError
from stack.fleet import as_workers, start_engines, start_router
from stack.fleet_log import FleetLog
from stack.load_process import send_load
from stack.options import check_policies
from stack.progress import Progress
from stack.results import BenchRuns, write_results
from stack.schedule import Run, interleaved
from stack.targets import served_model

TARGET_LABEL = "target"
_LAG_SHARE = 0.05
"""A client lateness beyond this share of the tightest TTFT threshold makes a run invalid."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of `prefixwatch bench`, as given; None stands for the scenario's own value."""

    scenario: str
    engine: str = "simulated"
    workers: int | None = None
    policies: list[str] = field(default_factory=lambda: ["round_robin", "cache_aware"])
    target: str | None = None
    model_dir: Path | None = None
    repeats: int = 3
    seed: int = 1
    duration_seconds: float | None = None
    out: Path = Path("results/latest")


def run_bench(options: BenchOptions, console: Console) -> tuple[dict[str, Any], int]:
    """Run a bench; answers the content of summary.json and the exit code. Raises one of INPUT_ERRORS."""
    return asyncio.run(_Bench(options, console).run())


class _Bench:
    def __init__(self, options: BenchOptions, console: Console) -> None:
        self.options = options
        self.console = console
        self.scenario = _scenario(options)
        self.objectives = load_objectives(self.scenario.slo)
        self.policies = [TARGET_LABEL] if options.target else check_policies(options.policies)
        self.workers = options.workers or self.scenario.engine.workers or 4
        self.model_dir = _model_dir(options)
        self.logs = options.out / "logs"

    async def run(self) -> tuple[dict[str, Any], int]:
        self.options.out.mkdir(parents=True, exist_ok=True)
        scenario_file = self.options.out / "scenario.yaml"
        scenario_file.write_text(
            yaml.safe_dump(self.scenario.model_dump(mode="json", exclude_unset=True), sort_keys=False),
            encoding="utf-8",
        )
        runs = BenchRuns(
            scenario=self.scenario,
            objectives=self.objectives,
            engine="target" if self.options.target else self.options.engine,
            workers=self.workers,
            policies=self.policies,
            seed=self.options.seed,
            again=self._again(),
        )
        async with self._engines() as engines:
            if engines:
                runs.block_size = engines[0].block_size
            with Progress(self.console, len(self.policies) * self.options.repeats) as progress:
                await self._make_runs(engines, scenario_file, runs, progress)
        return write_results(self.options.out, runs, self.console)

    async def _make_runs(
        self, engines: list[EngineHandle], scenario_file: Path, runs: BenchRuns, progress: Progress
    ) -> None:
        nonces = [secrets.token_hex(6) for _ in range(self.options.repeats)]
        for run in interleaved(self.policies, self.options.repeats):
            progress.begin(run)
            folder = self.logs / f"{run.position:02d}-{run.policy}-{run.repeat}"
            async with self._endpoint(run, engines, folder) as (url, model), FleetLog.following(engines, run) as log:
                # A target's caches can't be emptied, so there each run has prompts of its own.
                nonce = nonces[run.repeat] if engines else secrets.token_hex(6)
                config = RunConfig(
                    target=url,
                    scenario=str(scenario_file),
                    model_dir=self.model_dir,
                    model=model,
                    seed=self.options.seed + run.repeat,
                    nonce=nonce,
                    policy=run.policy,
                    repeat=run.repeat,
                    out=folder,
                    lag_limit_ms=self._lag_limit_ms(),
                )
                report = await send_load(config, folder, progress.update)
            for engine in engines:
                engine.process.check()
            runs.add(run, list(read_requests(folder / "requests.parquet")), report, log.rows)
            progress.end(report)

    @contextlib.asynccontextmanager
    async def _engines(self) -> AsyncIterator[list[EngineHandle]]:
        if self.options.target:
            yield []
            return
        hints = self.scenario.engine
        with self.console.status(f"starting {self.workers} {self.options.engine} engines …"):
            engines = await start_engines(
                self.options.engine,
                self.workers,
                self.logs,
                self.model_dir,
                {"capacity_blocks": hints.capacity_blocks, "profile": hints.profile, "seed": self.options.seed},
            )
        try:
            yield engines
        finally:
            await fleet.stop(engines)

    @contextlib.asynccontextmanager
    async def _endpoint(self, run: Run, engines: list[EngineHandle], folder: Path) -> AsyncIterator[tuple[str, str]]:
        """The address to send to and the model to ask for: the target, or a fresh router over emptied caches."""
        if self.options.target:
            yield self.options.target, await served_model(self.options.target)
            return
        await fleet.reset_caches(engines)
        config = RouterConfig(
            port=free_port(),
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
        given = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self.options).items()}
        return {"options": given, "scenario": self.scenario.model_dump(mode="json", exclude_unset=True)}

    def _lag_limit_ms(self) -> float:
        thresholds = [t for o in self.objectives for t in o.thresholds(RequestField.TTFT_SECONDS)]
        return 1000.0 * _LAG_SHARE * min(thresholds, default=0.5)


def _scenario(options: BenchOptions) -> Scenario:
    scenario = load_scenario(options.scenario)
    if options.duration_seconds is None:
        return scenario
    return scenario.model_copy(update={"duration_seconds": options.duration_seconds})


def _model_dir(options: BenchOptions) -> Path:
    if options.model_dir is None and options.target:
        raise UsageError(
            "--target needs --model-dir: the folder with the served model's tokenizer.json and "
            "tokenizer_config.json, so that prompts have exact lengths"
        )
    folder = options.model_dir or default_model_dir()
    Tokenizer(folder)  # told here, rather than by every process that will need it
    return folder
