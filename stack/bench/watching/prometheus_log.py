"""The workers behind a target while a run goes on, as a Prometheus has them: rows of `fleet.parquet`.

It scrapes a prefixwatch exporter, or the engines themselves; one row a worker and scrape, at the time when the engine
was read. Raw samples are asked for, not steps, so that no value is shown at a time at which nobody read it. So that the
engines' counters span the run, it begins once every worker was read after its beginning, and ends likewise.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from prefixwatch.alerts.prometheus import Prometheus, QueryRefusedError, Series, new_session
from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.metrics_page.families import FAMILIES
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.target import Target
from prefixwatch.loadgen.request_log.fleet_rows import FleetRow
from prefixwatch.stack.bench.schedule import Run
from prefixwatch.stack.bench.watching.fleet_log import engine_row
from prefixwatch.stack.errors import UsageError

FRESH_SECONDS = 150.0
"""How long to wait for new samples: more than twice the usual scrape interval of 60 s, the exporter's behind it."""
MOST_SKEW_SECONDS = 2.0
"""Between its clock and ours; its HTTP `Date` has whole seconds. More would put samples with the wrong requests."""
_POLL_SECONDS = 1.0
_SAME_READING_SECONDS = 0.01
"""A Prometheus that is faster than the exporter scrapes one reading several times."""
_SIGNALS = ("running_requests", "waiting_requests", "kv_usage_ratio", "prefix_hit_tokens", "prefix_query_tokens")
_COLUMNS = {
    "requests_running": "running",
    "requests_waiting": "waiting",
    "kv_usage_ratio": "kv_usage_ratio",
    "prefix_hit_tokens": "prefix_hit_tokens_total",
    "prefix_query_tokens": "prefix_query_tokens_total",
}
"""The exporter's families and the columns that they fill."""
_UP, _AGE = "target_up", "scrape_age_seconds"

Instants = Mapping[float, Sequence[tuple[Mapping[str, str], float]]]
"""The labels and values that one scrape brought, by its Unix time."""


class PrometheusLog:
    """Asks for what was scraped since the run began."""

    def __init__(self, url: str, match: str, run: Run, prometheus: Prometheus) -> None:
        self._where = f"--prometheus {url}"
        self._match = match
        self._run = run
        self._prometheus = prometheus
        self._begun = time.time()

    @classmethod
    @contextlib.asynccontextmanager
    async def following(cls, url: str, match: str, run: Run) -> AsyncIterator[list[FleetRow]]:
        """The rows, which are there after the run. `match` are label matchers of the workers' series; empty: all.

        Raises UsageError where the Prometheus has no engines or another time, PrometheusError where it can't be asked.
        """
        async with new_session() as session:
            log = cls(url, match, run, Prometheus(url, session))
            await log._check_clock()
            await log._fresh()
            rows: list[FleetRow] = []
            yield rows
            log_rows = await log._fresh()
            rows += sorted(log_rows, key=lambda row: (row.unix_s, row.worker))

    async def _check_clock(self) -> None:
        skew = await self._prometheus.clock_skew_seconds()
        if skew is not None and abs(skew) > MOST_SKEW_SECONDS:
            raise UsageError(
                f"{self._where}: its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this machine's, "
                "so its samples would go with the wrong requests: set both by NTP"
            )

    async def _fresh(self) -> list[FleetRow]:
        """What was read since the run began, once every worker that is up was read after now."""
        called = time.time()
        while True:
            rows = await self._rows()
            last = {row.worker: row for row in rows}
            if last and all(row.unix_s > called for row in last.values() if row.up):
                return rows
            if time.time() - called > FRESH_SECONDS:
                if not last:
                    raise UsageError(
                        f"{self._where}: nothing in it about engines{self._matching()} is younger than "
                        f"{FRESH_SECONDS:.0f} s: let it scrape the engines behind the target, or their prefixwatch "
                        "exporter, and check --prometheus-match"
                    )
                return rows
            await asyncio.sleep(_POLL_SECONDS)

    def _matching(self) -> str:
        return f" with {self._match}" if self._match else ""

    async def _rows(self) -> list[FleetRow]:
        exported = await self._samples([FAMILIES[name].full_name for name in (*_COLUMNS, _UP, _AGE)])
        if exported:
            return [row for name, own in _by(exported, "target") for row in exporter_rows(name, own, self._run)]
        scraped = await self._samples(_engine_names())
        return [row for name, own in _by(scraped, "instance") for row in engine_rows(name, own, self._run)]

    async def _samples(self, names: Sequence[str]) -> list[Series]:
        own = f",{self._match}" if self._match else ""
        now = time.time()
        try:
            return await self._prometheus.raw(f'{{__name__=~"{"|".join(names)}"{own}}}', now - self._begun, now)
        except QueryRefusedError as error:
            raise UsageError(
                f"{self._where} refuses the query ({error}): write --prometheus-match as label matchers, such as "
                '\'job="vllm",cluster="staging"\''
            ) from error


def _engine_names() -> list[str]:
    """How systems of engines name the signals of a row, and themselves; and `up`, a Prometheus' own word."""
    catalogue = shipped_catalogue()
    systems = [system for system in map(catalogue.get, catalogue.names) if system.role == "engine"]
    names = {
        family.marker(signal.kind)
        for system in systems
        for name, signal in system.signals.items()
        if name in _SIGNALS
        for source in signal.sources
        for family in source.families
    }
    return sorted(names.union(["up"], *(system.detect.any_of for system in systems)))


def _by(series: Sequence[Series], label: str) -> Iterator[tuple[str, Instants]]:
    """Each worker's samples by their time."""
    found: dict[str, dict[float, list[tuple[Mapping[str, str], float]]]] = defaultdict(lambda: defaultdict(list))
    for each in series:
        for at, value in each.points:
            found[each.labels.get(label, "")][at].append((each.labels, value))
    for worker in sorted(found):
        yield worker, dict(sorted(found[worker].items()))


def exporter_rows(worker: str, instants: Instants, run: Run) -> Iterator[FleetRow]:
    """An exporter's samples of one target; those of one reading of the target make one row. None of a router."""
    last_read = 0.0
    rows = []
    for at, samples in instants.items():
        values: dict[str, list[float]] = defaultdict(list)
        for labels, value in samples:
            values[labels["__name__"]].append(value)
        up = values.get(FAMILIES[_UP].full_name, [0.0])[0] == 1.0
        read = at - values.get(FAMILIES[_AGE].full_name, [0.0])[0] if up else at
        if read - last_read < _SAME_READING_SECONDS:
            continue
        last_read = read
        row = _unknown(worker, run, read, up=up)
        for name, column in _COLUMNS.items():
            setattr(row, column, _of(values.get(FAMILIES[name].full_name), name))
        rows.append(row)
    if any(row.running is not None or row.prefix_query_tokens_total is not None for row in rows):
        yield from rows


def _unknown(worker: str, run: Run, unix_s: float, *, up: bool) -> FleetRow:
    return FleetRow(
        unix_s=unix_s,
        policy=run.policy,
        repeat=run.repeat,
        worker=worker,
        up=up,
        running=None,
        waiting=None,
        kv_usage_ratio=None,
        prefix_hit_tokens_total=None,
        prefix_query_tokens_total=None,
    )


def _of(values: list[float] | None, name: str) -> float | None:
    """Ranks' usages don't add up; all else does."""
    if values is None:
        return None
    return max(values) if name == "kv_usage_ratio" else sum(values)


def engine_rows(worker: str, instants: Instants, run: Run) -> Iterator[FleetRow]:
    """An engine's own samples, read as the exporter reads a page. None of what was no engine at any time."""
    config = TargetConfig(name=worker, url=f"http://{worker}/metrics")
    target = Target(config, ExporterConfig(targets=(config,)), shipped_catalogue())
    rows = []
    for at, samples in instants.items():
        target.ingest(Scrape(0.0, _page(samples), content_type="text/plain"), at)
        rows.append(engine_row(target, run, at))
    if any(row.up for row in rows):
        yield from rows


def _page(samples: Sequence[tuple[Mapping[str, str], float]]) -> bytes:
    """The samples as the text that they were scraped from."""
    lines = []
    for labels, value in samples:
        own = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items() if name != "__name__")
        lines.append(f"{labels['__name__']}{{{own}}} {value!r}\n")
    return "".join(lines).encode()


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
