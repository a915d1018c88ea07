"""Keeps the targets of all jobs current: looks, waits, looks again, and remembers the last good answer."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from prefixwatch.exporters.config import TargetConfig
from prefixwatch.exporters.discovery.config import ScrapeConfig
from prefixwatch.exporters.discovery.job import provider_for, sd_configs, static_targets, target_configs
from prefixwatch.exporters.discovery.provider import DiscoveryError, Provider
from prefixwatch.exporters.discovery.relabel import Labels
from prefixwatch.exporters.http.client_config import Strict
from prefixwatch.exporters.scraping.scrape import Scraper

_log = logging.getLogger("prefixwatch.discovery")

_LOGGED_PROBLEMS = 10


@dataclass(slots=True, eq=False)
class _Lookup:
    """One place of one job, and what was found there last."""

    job: str
    config: Strict
    provider: Provider
    found: list[Labels] = field(default_factory=list)
    problem: str = ""
    """Why the last look failed, in whole or in part; empty when it didn't."""
    task: asyncio.Task[None] | None = None

    @property
    def discovery(self) -> str:
        return f"{self.job}/{self.provider.name}"


@dataclass(slots=True)
class Discovery:
    """All jobs. `on_change` is called whenever the targets may have changed."""

    scraper: Scraper
    on_change: Callable[[], None]
    failures: Counter[str] = field(default_factory=Counter)
    """Looks that failed, by `job/mechanism`."""
    _jobs: Sequence[ScrapeConfig] = ()
    _lookups: list[_Lookup] = field(default_factory=list)
    _problems: tuple[str, ...] = ()

    async def configure(self, jobs: Sequence[ScrapeConfig]) -> None:
        """Serve these jobs from now on, after one look at every place that is new; the others go on undisturbed.

        Raises ExporterError, and changes nothing, when a place can't be looked at from this machine at all.
        """
        before = list(self._lookups)
        kept: list[_Lookup] = []
        new: list[_Lookup] = []
        for job in jobs:
            for config in sd_configs(job):
                same = next((one for one in before if one.job == job.job_name and one.config == config), None)
                if same is None:
                    new.append(_Lookup(job.job_name, config, provider_for(config, self.scraper)))
                else:
                    before.remove(same)
                    kept.append(same)
        await asyncio.gather(*(self._look(lookup) for lookup in new))
        self._jobs, self._lookups = jobs, kept + new
        for lookup in self._lookups:
            self.failures.setdefault(lookup.discovery, 0)
        await _stop(before)

    def keep_looking(self) -> None:
        """Look again from now on, each place at its own pace."""
        for lookup in self._lookups:
            if lookup.task is None:
                lookup.task = asyncio.create_task(self._loop(lookup), name=f"discovery {lookup.discovery}")

    async def close(self) -> None:
        await _stop(self._lookups)

    def targets(self, most: int) -> list[TargetConfig]:
        """Of all jobs, in their order, at most the limit; what can't be a target is among `problems`."""
        targets: list[TargetConfig] = []
        problems: list[str] = []
        for job in self._jobs:
            own = (lookup.found for lookup in self._lookups if lookup.job == job.job_name)
            of_job, wrong = target_configs(job, chain(static_targets(job), *own), most - len(targets))
            targets += of_job
            problems += wrong
        if tuple(problems) != self._problems:
            for problem in problems[:_LOGGED_PROBLEMS]:
                _log.warning("discovered target left out", extra={"problem": problem})
            if len(problems) > _LOGGED_PROBLEMS:
                _log.warning("more discovered targets left out", extra={"targets": len(problems) - _LOGGED_PROBLEMS})
        self._problems = tuple(problems)
        return targets

    def found_counts(self) -> dict[str, int]:
        """Label sets found, before relabelling, by `job/mechanism`."""
        counts: Counter[str] = Counter()
        for lookup in self._lookups:
            counts[lookup.discovery] += len(lookup.found)
        for job in self._jobs:
            if job.static_configs:
                counts[f"{job.job_name}/static"] += len(static_targets(job))
        return dict(counts)

    def problems(self) -> list[str]:
        """For people: what is wrong now."""
        return [*(lookup.problem for lookup in self._lookups if lookup.problem), *self._problems]

    async def _loop(self, lookup: _Lookup) -> None:
        while True:
            await lookup.provider.changed()
            before = lookup.found
            await self._look(lookup)
            if lookup.found != before:
                self.on_change()

    async def _look(self, lookup: _Lookup) -> None:
        try:
            found = await lookup.provider.fetch()
        except DiscoveryError as error:
            problem = str(error)
        except Exception as error:  # a mistake of ours about one answer must not end all further looks
            _log.exception("discovery ended by a fault of the exporter", extra={"discovery": lookup.discovery})
            problem = f"{lookup.discovery}: {type(error).__name__}; the exporter's log has more"
        else:
            lookup.found = found.targets
            problem = "; ".join(found.problems)
        if problem:
            self.failures[lookup.discovery] += 1
        if problem != lookup.problem:
            if problem:
                _log.warning("discovery failed", extra={"discovery": lookup.discovery, "problem": problem})
            else:
                _log.info("discovery works again", extra={"discovery": lookup.discovery})
        lookup.problem = problem


async def _stop(lookups: Sequence[_Lookup]) -> None:
    tasks = [lookup.task for lookup in lookups if lookup.task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for lookup in lookups:
        await lookup.provider.close()
