"""The highest rate that still meets every objective: brackets by doubling or halving, then bisects. Pure.

A rate is run again, and its requests pooled, while the Wilson interval of an objective's good share still holds the
objective; it passes when the whole interval of every objective lies at or above it, and fails when that of one lies
below. What is still open after the last repeat steers the search by its measured shares and is called `likely`. The
search takes for granted that a fleet which fails at one rate fails at every higher one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, Literal

from prefixwatch.loadgen.grading.wording import number, percent, percent_interval
from prefixwatch.slo.wilson import CONFIDENCE, wilson

Verdict = Literal["pass", "likely_pass", "likely_fail", "fail"]


@dataclass(frozen=True, slots=True)
class Share:
    """How many of an objective's requests were good; `target` is the share that should be."""

    name: str
    target: float
    good: int
    total: int

    @property
    def measured(self) -> float:
        return self.good / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's, at 95 %."""
        return wilson(self.good, self.total)

    @property
    def verdict(self) -> Verdict:
        """Without a request that counts, the objective can't be met."""
        limits = self.interval
        if limits is None or limits[1] < self.target:
            return "fail"
        if limits[0] >= self.target:
            return "pass"
        return "likely_pass" if self.measured >= self.target else "likely_fail"

    def pooled(self, other: Share) -> Share:
        """Both together."""
        return Share(self.name, self.target, self.good + other.good, self.total + other.total)


_WORST_FIRST: tuple[Verdict, ...] = ("fail", "likely_fail", "likely_pass", "pass")


@dataclass(slots=True)
class RateStep:
    """All runs at one rate, requests a second."""

    rate: float
    runs: int = 0
    shares: dict[str, Share] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The worst objective's."""
        verdicts = {share.verdict for share in self.shares.values()}
        return next((verdict for verdict in _WORST_FIRST if verdict in verdicts), "fail")

    @property
    def passes(self) -> bool:
        return self.verdict in ("pass", "likely_pass")

    @property
    def tightest(self) -> Share | None:
        """The objective that has least to spare, or is missed by most."""
        shares = self.shares.values()
        return min(shares, key=lambda s: (_WORST_FIRST.index(s.verdict), s.measured - s.target), default=None)

    def as_json(self) -> dict[str, Any]:
        return {
            "rate_per_second": self.rate,
            "runs": self.runs,
            "verdict": self.verdict,
            "objectives": {
                s.name: {"measured": s.measured, "objective": s.target, "ci95": s.interval, "total": s.total}
                for s in self.shares.values()
            },
        }


class RateSearch:
    """Ask `next_rate`, run it, tell `note` what came of it; until there is no next rate."""

    def __init__(self, start: float, *, low: float, high: float, precision_ratio: float, repeats: int) -> None:
        self._start = min(max(start, low), high)
        self._low, self._high = low, high
        self._precision = precision_ratio
        self._repeats = repeats
        self._open: RateStep | None = None
        self.steps: list[RateStep] = []

    @property
    def best(self) -> RateStep | None:
        """The highest rate that passes, below the lowest that fails."""
        failing = self.failing
        passing = [s for s in self._settled if s.passes and (failing is None or s.rate < failing.rate)]
        return max(passing, key=lambda step: step.rate, default=None)

    @property
    def failing(self) -> RateStep | None:
        """The lowest rate that fails."""
        return min((step for step in self._settled if not step.passes), key=lambda step: step.rate, default=None)

    @property
    def _settled(self) -> list[RateStep]:
        return [step for step in self.steps if step is not self._open]

    def next_rate(self) -> float | None:
        """The rate to run now, requests a second; None when the search is over."""
        if self._open is not None:
            return self._open.rate
        if not self.steps:
            return self._start
        best, failing = self.best, self.failing
        if failing is None:
            assert best is not None
            return None if best.rate >= self._high else min(2 * best.rate, self._high)
        if best is None:
            return None if failing.rate <= self._low else max(failing.rate / 2, self._low)
        return sqrt(best.rate * failing.rate) if failing.rate > best.rate * (1 + self._precision) else None

    def runs_at(self, rate: float) -> int:
        """Runs of this rate so far."""
        return next((step.runs for step in self.steps if step.rate == rate), 0)

    def note(self, shares: Sequence[Share]) -> None:
        """What one run at `next_rate` measured, an entry an objective. Raises ValueError without any."""
        if not shares:
            raise ValueError("a search for the highest rate needs objectives: name SLO documents in the scenario")
        rate = self.next_rate()
        assert rate is not None
        if self._open is None:
            self._open = RateStep(rate)
            self.steps.append(self._open)
        step = self._open
        step.runs += 1
        for share in shares:
            known = step.shares.get(share.name)
            step.shares[share.name] = share if known is None else known.pooled(share)
        if step.verdict in ("pass", "fail") or step.runs >= self._repeats:
            self._open = None

    @property
    def exit_code(self) -> int:
        """0: found, with confidence; 1: even the lowest rate fails; 3: found, but not with confidence or no end."""
        if self.best is None:
            return 1
        return 0 if self.best.verdict == "pass" and self.failing is not None else 3

    def statement(self) -> str:
        """What was found and how sure it is, in words."""
        best, failing = self.best, self.failing
        if best is None:
            return f"no rate down to {number(self._low)} req/s meets the objectives: {_why(failing)}"
        sure = (
            f"with {percent(CONFIDENCE)} confidence" if best.verdict == "pass" else "as measured, not with confidence"
        )
        text = f"{number(best.rate)} req/s meets every objective {sure} ({_why(best)}, {_runs(best)})"
        if failing is None:
            remedy = ": raise search.max_per_second" if best.rate >= self._high else ""
            return f"{text}; no higher rate was tried{remedy}"
        return f"{text}; {number(failing.rate)} req/s doesn't ({_why(failing)}, {_runs(failing)})"

    def as_json(self) -> dict[str, Any]:
        best, failing = self.best, self.failing
        return {
            "rate_per_second": None if best is None else best.rate,
            "failing_rate_per_second": None if failing is None else failing.rate,
            "confident": self.exit_code == 0,
            "statement": self.statement(),
            "steps": [step.as_json() for step in self.steps],
        }


def _why(step: RateStep | None) -> str:
    share = None if step is None else step.tightest
    if share is None:
        return "nothing was measured"
    limits = "no request counts" if share.interval is None else f"95 % interval {percent_interval(share.interval)}"
    return f"{share.name} {percent(share.measured)} of {percent(share.target)}, {limits}"


def _runs(step: RateStep) -> str:
    requests = max((share.total for share in step.shares.values()), default=0)
    return f"{requests} requests in {step.runs} run{'s' if step.runs > 1 else ''}"
