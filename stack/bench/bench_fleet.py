"""What a bench sends to: engines that it starts, with a fresh router for each run, or a target that runs already."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from prefixwatch.engines import fleet
from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.engines.process import free_port
from prefixwatch.loadgen.scenario.model import Scenario
from prefixwatch.router.config import CacheViewConfig, PolicyConfig, RouterConfig
from prefixwatch.router.tenant_config import TenantsConfig
from prefixwatch.stack.bench.options import BenchOptions, endpoint_of
from prefixwatch.stack.bench.scenario_choice import check_fleet_options
from prefixwatch.stack.bench.schedule import Run
from prefixwatch.stack.config import PrefixwatchConfig
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.fleet import as_workers, start_engines
from prefixwatch.stack.local.fleet_driver import FleetDriver, LocalRouter
from prefixwatch.stack.local.targets import Endpoint, check_served_tokenizer, check_tokenizer, served_model
from prefixwatch.stack.local.up import start_exporter


class BenchFleet:
    """The engines, or the target, of all runs. Raises InputError for options that don't fit the scenario."""

    def __init__(self, options: BenchOptions, scenario: Scenario, console: Console, model_dir: Path | None) -> None:
        self.options = options
        self.scenario = scenario
        self.console = console
        self.model_dir = model_dir
        self.logs = options.out / "logs"
        self.endpoint = endpoint_of(options)
        if self.endpoint is None:
            check_fleet_options(scenario, options.workers)
        elif scenario.events:
            raise UsageError(
                f"scenario {scenario.name} has events, which happen to engines that a bench starts: leave out "
                "--target, or the events"
            )
        if options.live and options.target:
            raise UsageError(
                "--live watches the engines that a bench starts; with --target run `prefixwatch exporter` beside it"
            )
        self.workers = options.workers or (None if self.endpoint is not None else scenario.workers)
        self.plan = scenario.event_plan(self.workers) if scenario.events else None
        self.driver: FleetDriver | None = None
        self.router_port = free_port() if options.live else None
        """The same for all runs where an exporter scrapes it."""

    def check(self, engines: list[EngineHandle]) -> None:
        """Raise InputError where an engine has ended, or an event couldn't be made."""
        if self.driver is None:
            for engine in engines:
                engine.process.check()
        elif self.driver.failures:
            raise UsageError(f"scenario {self.scenario.name}: {self.driver.failures[0]}")

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator[list[EngineHandle]]:
        """The engines while they run; none of a target."""
        if self.endpoint is not None:
            yield []
            return
        assert self.workers is not None
        hints = self.scenario.engine
        simulated = {"profile": hints.profile, "max_model_len": hints.max_model_len, "seed": self.options.seed}
        count = self.workers if self.plan is None else self.plan.all_workers
        with self.console.status(f"starting {count} {self.options.engine} engines …"):
            engines = await start_engines(
                self.options.engine,
                count,
                self.logs,
                self.model_dir,
                {
                    "block_size": hints.block_size,
                    "capacity_blocks": hints.capacity_blocks,
                    **(simulated if self.options.engine == "simulated" else {"seed": self.options.seed}),
                },
                self.scenario.fleet,
            )
        if self.plan is not None:
            self.driver = FleetDriver(self.plan, engines)
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
        exporter = await start_exporter(config, as_workers(engines, self.scenario.fleet), router_url, self.logs)
        self.console.print(f"live page: http://{config.exporter.listen}/", soft_wrap=True, highlight=False)
        try:
            yield
        finally:
            await asyncio.to_thread(exporter.stop)

    @contextlib.asynccontextmanager
    async def endpoint_of(
        self, run: Run, policy: str, engines: list[EngineHandle], folder: Path
    ) -> AsyncIterator[tuple[str, str, Callable[[dict[str, Any]], None]]]:
        """The address to send to and the model to ask for: the target, or a fresh router over emptied caches; and what
        wants to hear the load generator's progress."""
        if self.endpoint is not None:
            model = await served_model(self.endpoint, self.options.model)
            await self._check_tokenizer(self.endpoint, model)
            yield self.endpoint.url, model, nobody
            return
        if self.driver is not None:
            await self.driver.prepare()
        await fleet.reset_caches(engines if self.driver is None else self.driver.present)
        config = RouterConfig(
            port=self.router_port or free_port(),
            workers=as_workers(engines, self.scenario.fleet),
            policy=PolicyConfig(name=policy, seed=self.options.seed + run.repeat),
            model_dir=self.model_dir,
            block_size=engines[0].block_size,
            cache_view=CacheViewConfig(source="events"),
            always_predict=True,
            tenants=TenantsConfig(trust_client_salt=True),
        )
        router = LocalRouter(config, folder)
        await router.start()
        try:
            async with contextlib.nullcontext(nobody) if self.driver is None else self.driver.acting(router) as heard:
                yield router.url, engines[0].model, heard
        finally:
            await router.stop()

    async def _check_tokenizer(self, endpoint: Endpoint, model: str) -> None:
        """See that prompts of exact lengths can be made for the target. Raises InputError."""
        if self.options.approximate_prompts:
            return
        if self.model_dir is not None:
            await check_tokenizer(endpoint, model, self.model_dir)
        else:
            await asyncio.to_thread(check_served_tokenizer, endpoint, model, self.options.tokenize_url)


def nobody(progress: dict[str, Any]) -> None:
    """Nobody wants to hear of the progress."""
