"""Several levels of load, one after another: a sweep over rates or users, or the search for the highest rate.

How a level is run is passed in, so that live fleets and simulated ones are swept and searched alike.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.table import Table

from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE
from prefixwatch.loadgen.grading.grade import grade_policy
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.grading.model import PolicyGrade
from prefixwatch.loadgen.grading.rate_search import RateSearch, Share
from prefixwatch.loadgen.grading.summary import EXIT_CODES, policy_verdict
from prefixwatch.loadgen.grading.wording import figure_text, number, percent
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.loadgen.request_log.records import RequestRecord
from prefixwatch.loadgen.scenario.model import Scenario
from prefixwatch.slo.objective import Objective
from prefixwatch.stack.bench.recording_options import RecordingOptions
from prefixwatch.stack.cli.command import load_option
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.interrupt import Interrupt, StoppedError

LevelKind = Literal["rate", "concurrency"]
_UNITS = {"rate": "req/s", "concurrency": "users"}
OPEN_EXIT_CODE = 3
DEFAULT_REPEATS = 3
"""Of a command that compares policies at one load."""


@dataclass(frozen=True, slots=True)
class LevelRun:
    """What one run of one level gave; `reasons` say why it isn't valid, if it isn't."""

    records: list[RequestRecord]
    reasons: Sequence[str] = ()


RunLevel = Callable[[Scenario, str, int], Awaitable[LevelRun]]
"""Runs a scenario under a policy; the number counts the runs of that level from 0."""


@dataclass(frozen=True, slots=True)
class LevelsRequest:
    """Which levels to run: a list of them, or, without one, the search for the highest rate."""

    kind: LevelKind
    values: Sequence[float] = ()

    @property
    def searches(self) -> bool:
        return not self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelOptions(RecordingOptions):
    """The options for several levels of load, instead of comparing policies at one."""

    search_rate: Annotated[
        bool, load_option("--search-rate", help="Find the highest rate that still meets the objectives.")
    ] = False
    sweep_rate: Annotated[str, load_option(help="Run these rates in requests per second, comma-separated.")] = ""
    sweep_concurrency: Annotated[
        str,
        load_option(
            help="Run closed loops with these numbers of users (comma-separated); reports label them as closed."
        ),
    ] = ""

    @property
    def levels(self) -> LevelsRequest | None:
        """None for one load only. Raises UsageError."""
        return levels_request(
            search_rate=self.search_rate, sweep_rate=self.sweep_rate, sweep_concurrency=self.sweep_concurrency
        )


def check_repeats(levels: LevelsRequest | None, repeats: int) -> None:
    """Raise UsageError for a number of repeats where the levels decide it."""
    if levels is not None and repeats not in (1, DEFAULT_REPEATS):
        raise UsageError(
            "--repeats: a sweep runs each level once, and a search each rate until its verdict is sure, at most "
            "search.repeats times of the scenario: leave the option out"
        )


def levels_request(*, search_rate: bool, sweep_rate: str, sweep_concurrency: str) -> LevelsRequest | None:
    """What these options ask for; None for none of them. Raises UsageError."""
    given = [
        name
        for name, value in (
            ("--search-rate", search_rate),
            ("--sweep-rate", sweep_rate),
            ("--sweep-concurrency", sweep_concurrency),
        )
        if value
    ]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: give one of them")
    if search_rate:
        return LevelsRequest("rate")
    if sweep_rate:
        return LevelsRequest("rate", _numbers("--sweep-rate", sweep_rate, float))
    if sweep_concurrency:
        return LevelsRequest("concurrency", _numbers("--sweep-concurrency", sweep_concurrency, int))
    return None


def _numbers(option: str, text: str, kind: type[float]) -> list[float]:
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text}: give numbers with commas between them, such as 1,2,4") from error
    if not all(0 < value < inf for value in values):
        raise UsageError(f"{option} {text}: every number must be above 0, and finite")
    return values


async def run_levels(
    scenario: Scenario,
    objectives: Sequence[Objective],
    policies: Sequence[str],
    request: LevelsRequest,
    *,
    run: RunLevel,
    console: Console,
    block_size: int = DEFAULT_BLOCK_SIZE,
    interrupt: Interrupt | None = None,
) -> tuple[dict[str, Any], int]:
    """Sweep or search under each policy; answers what was found and the exit code.

    After an interrupt that is what was found so far, and inconclusive. Raises UsageError.
    """
    interrupt = interrupt or Interrupt(console)
    levels = _Levels(scenario, objectives, run, console, block_size=block_size, interrupt=interrupt)
    found: dict[str, Any] = {}
    codes = [0]
    for policy in policies:
        if interrupt.asked:
            codes.append(OPEN_EXIT_CODE)
            break
        if request.searches:
            found[policy], code = await levels.search(policy)
        else:
            found[policy], code = await levels.sweep(policy, request)
        codes.append(code)
    mode = "search-rate" if request.searches else f"sweep-{request.kind}"
    return {"scenario": scenario.name, "mode": mode, "policies": found}, _worst(codes)


def write_levels(folder: Path, found: dict[str, Any]) -> None:
    """Write `levels.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "levels.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


class _Levels:
    def __init__(
        self,
        scenario: Scenario,
        objectives: Sequence[Objective],
        run: RunLevel,
        console: Console,
        *,
        block_size: int,
        interrupt: Interrupt,
    ) -> None:
        self._scenario = scenario
        self._objectives = objectives
        self._run = run
        self._console = console
        self._block_size = block_size
        self._interrupt = interrupt

    async def search(self, policy: str) -> tuple[dict[str, Any], int]:
        """The highest rate that meets the objectives; an invalid run ends the search."""
        if not self._objectives:
            raise UsageError(f"scenario {self._scenario.name} has no objectives to search by: add slo to it")
        keys = self._scenario.search
        start = keys.start_per_second or self._scenario.mean_rate
        if start is None:
            raise UsageError("--search-rate needs arrivals with a rate: poisson, gamma or constant")
        search = RateSearch(
            start,
            low=keys.min_per_second,
            high=keys.max_per_second,
            precision_ratio=keys.precision_ratio,
            repeats=keys.repeats,
        )
        spoiled = ""
        while (rate := search.next_rate()) is not None:
            repeat = search.runs_at(rate)
            level = await self._level(_at(self._scenario, "rate", rate, "--search-rate"), policy, repeat)
            if level is None:
                spoiled = "stopped by hand"
                break
            grade = self._graded(level)
            self._tell(policy, "rate", rate, grade)
            if level.reasons:
                spoiled = "; ".join(level.reasons)
                break
            search.note([Share(o.name, o.objective, o.good, o.total) for o in grade.objectives])
        ended = f"; the search ended early, because a run is not valid: {spoiled}" if spoiled else ""
        self._console.print(f"{policy}: {search.statement()}{ended}", soft_wrap=True, highlight=False)
        found = {**search.as_json(), "invalid": spoiled or None}
        return found, OPEN_EXIT_CODE if spoiled else search.exit_code

    async def sweep(self, policy: str, request: LevelsRequest) -> tuple[dict[str, Any], int]:
        """Every level once."""
        table = _table(f"{self._scenario.name}, {policy}", request.kind)
        steps, codes = [], [0]
        for value in request.values:
            level = await self._level(_at(self._scenario, request.kind, value, f"--sweep-{request.kind}"), policy, 0)
            if level is None:
                codes.append(OPEN_EXIT_CODE)
                break
            grade = self._graded(level)
            self._tell(policy, request.kind, value, grade)
            verdict = "invalid" if level.reasons else policy_verdict(grade)
            codes.append(EXIT_CODES.get(verdict, OPEN_EXIT_CODE))
            throughput = _throughput(level.records)
            table.add_row(*_row(value, grade, throughput, verdict))
            steps.append(
                {
                    request.kind: value,
                    "verdict": verdict,
                    "reasons": list(level.reasons),
                    "throughput_rps": throughput,
                    "grade": grade.model_dump(mode="json"),
                }
            )
        self._console.print(table)
        return {"steps": steps}, _worst(codes)

    async def _level(self, scenario: Scenario, policy: str, repeat: int) -> LevelRun | None:
        """One run; None when the user ended it all before it began."""
        if self._interrupt.asked:
            return None
        try:
            return await self._run(scenario, policy, repeat)
        except StoppedError:
            return None

    def _graded(self, level: LevelRun) -> PolicyGrade:
        measured = Measured(Columns.of(level.records, self._block_size), self._objectives)
        return grade_policy(measured, warm=self._scenario.warm)

    def _tell(self, policy: str, kind: LevelKind, value: float, grade: PolicyGrade) -> None:
        shares = ", ".join(f"{o.name} {percent(o.measured)}" for o in grade.objectives)
        self._console.print(f"{policy} at {number(value)} {_UNITS[kind]}: {shares}", soft_wrap=True, highlight=False)


def _at(scenario: Scenario, kind: LevelKind, value: float, option: str) -> Scenario:
    try:
        return scenario.at_rate(value) if kind == "rate" else scenario.at_concurrency(int(value))
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def _throughput(records: Sequence[RequestRecord]) -> float | None:
    """Completed requests a second, from the first sending to the last end."""
    done = [
        r for r in records if r.phase == "measured" and r.outcome == "completed" and r.sent_s is not None and r.end_s
    ]
    if len(done) < 2:
        return None
    seconds = max(r.end_s or 0.0 for r in done) - min(r.sent_s or 0.0 for r in done)
    return len(done) / seconds if seconds > 0 else None


def _table(title: str, kind: LevelKind) -> Table:
    table = Table(title=title)
    headings = ("done\nreq/s", "TTFT\np50 ms", "TTFT\np95 ms", "TPOT\np50 ms", "hit\ntokens", "good-\nput", "verdict")
    for name in (_UNITS[kind], *headings):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _row(value: float, grade: PolicyGrade, throughput: float | None, verdict: str) -> list[str]:
    return [
        number(value),
        number(throughput),
        *(figure_text(grade, name) for name in ("ttft_p50", "ttft_p95", "tpot_p50", "hit_ratio", "goodput_ratio")),
        verdict,
    ]


def _worst(codes: Sequence[int]) -> int:
    """A failure outweighs an open question, which outweighs success."""
    return 1 if 1 in codes else max(codes)
