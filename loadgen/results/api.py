"""The Python API: finished runs as data. `import prefixwatch` offers these names; they load pandas when used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from prefixwatch.loadgen.grading.comparison import Comparison
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.grading.summary import Summary, Verdict, exit_code, graded_columns, verdict_sentence
from prefixwatch.loadgen.results import comparison as run_comparison
from prefixwatch.loadgen.results import frames, run_folder
from prefixwatch.loadgen.results.comparison import RunDifference, RunsCompared


class Run:
    """A finished run. Every attribute is computed when it is first used."""

    def __init__(self, finished: run_folder.FinishedRun) -> None:
        self._finished = finished

    @property
    def path(self) -> Path:
        """Its folder, or its request log."""
        return self._finished.path

    @cached_property
    def summary(self) -> Summary:
        """The content of summary.json, graded from the request log."""
        return self._finished.summary

    @property
    def verdict(self) -> Verdict:
        """`pass`, `fail`, `inconclusive` or `not_graded`."""
        return self.summary.verdict

    @property
    def exit_code(self) -> int:
        """The exit code that the command line gives this run: 0, 1 or 3."""
        return exit_code(self.summary)

    def explain(self) -> str:
        """The verdict and its reasons in words, several lines."""
        return verdict_sentence(self.summary)

    @cached_property
    def _policies(self) -> dict[str, Measured]:
        found = self._finished
        columns = graded_columns(found.log, found.facts)
        return {name: Measured(own, found.objectives, workers=found.facts.workers) for name, own in columns.items()}

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row per measured request, as it was graded; see `frames.requests_frame`."""
        return frames.requests_frame(self._policies, self._finished.log)

    @cached_property
    def log(self) -> pd.DataFrame:
        """Every row of requests.parquet, priming, warm-up and cool-down included."""
        return frames.log_frame(self._finished.log)

    @cached_property
    def fleet(self) -> pd.DataFrame:
        """One row per worker and reading; empty where the engines weren't watched."""
        return frames.fleet_frame(self._finished.fleet)

    @cached_property
    def figures(self) -> pd.DataFrame:
        """One row per policy and figure, with unit, 95 % interval and sample size."""
        return frames.figures_frame(self.summary)

    @cached_property
    def objectives(self) -> pd.DataFrame:
        """One row per policy and objective."""
        return frames.objectives_frame(self.summary)

    @cached_property
    def comparison(self) -> pd.DataFrame:
        """One row per figure of each policy against the baseline, the first policy; differences are a − b."""
        return frames.rows_frame(self.summary.comparison, Comparison)

    def by(self, *columns: str) -> pd.DataFrame:
        """The grader's figures by group, such as `run.by("tenant", "cache")`; one row per policy and group.

        Raises KeyError for a name that isn't a column of `requests`.
        """
        return frames.by_group(self._policies, self.requests, columns)


@dataclass(frozen=True)
class ComparedRuns:
    """Two runs compared; `a` is the baseline."""

    result: RunsCompared

    @property
    def verdict(self) -> str:
        """`same`, `better`, `worse` (B against A) or `inconclusive`."""
        return self.result.verdict

    @property
    def exit_code(self) -> int:
        """0, 1 when B is worse, 3 when inconclusive."""
        return run_comparison.EXIT_CODES[self.result.verdict]

    @property
    def reasons(self) -> list[str]:
        """Why there is no verdict; empty when there is one."""
        return self.result.reasons

    @property
    def notes(self) -> list[str]:
        """What to know first, such as that the plans differ."""
        return self.result.notes

    @cached_property
    def comparison(self) -> pd.DataFrame:
        """One row per figure; `difference` is b − a, `relative` (b − a) / a."""
        return frames.rows_frame(self.result.comparison, RunDifference)


def read_run(path: str | Path) -> Run:
    """A finished run from its folder, or from a requests.parquet alone. Raises InputError."""
    return Run(run_folder.read_run(Path(path)))


def grade(source: str | Path, slos: Sequence[str | Path]) -> Run:
    """The same, graded on these SLO documents (files, or names of shipped ones). Raises InputError."""
    return Run(run_folder.read_run(Path(source), [str(each) for each in slos]))


def compare(
    a: str | Path,
    b: str | Path,
    *,
    policies: Sequence[str] = (),
    slos: Sequence[str | Path] = (),
    tolerance_percent: float = 0.0,
) -> ComparedRuns:
    """Which figures of run B differ from those of run A, by how much and with what confidence. Raises InputError.

    `policies` names those to compare; default: all that both runs have. A loss of less than `tolerance_percent` of A's
    figure is ignored.
    """
    names = [str(each) for each in slos]
    result, _ = run_comparison.run_compare(Path(a), Path(b), policies, names, tolerance_percent)
    return ComparedRuns(result)
