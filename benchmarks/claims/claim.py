"""A published claim, and its result here.

Absolute figures of other people's hardware aren't expected back: each claim comes with checks that need no scale
(signs, orderings, rough ratios), and a claim holds here when all of its checks do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Verdict(StrEnum):
    """What is said of a claim."""

    HOLDS = "holds"
    IN_PART = "holds in part"
    DOES_NOT_HOLD = "does not hold"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Check:
    """Something that should be seen if the claim is right, and whether it was."""

    expected: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """Our figures, in words, and the checks on them."""

    figures: str
    checks: tuple[Check, ...]
    seeds: str = ""
    remark: str = ""
    """What a reader of the verdict must know."""

    @property
    def verdict(self) -> Verdict:
        held = sum(check.holds for check in self.checks)
        if held == len(self.checks):
            return Verdict.HOLDS
        return Verdict.IN_PART if held else Verdict.DOES_NOT_HOLD


@dataclass(frozen=True, slots=True)
class Setting:
    """How claims are tried. `data` is the folder of the Mooncake traces; `quick` takes smaller runs, for tests."""

    data: Path
    quick: bool = False

    def trace(self, name: str) -> Path:
        """The file of a trace: `conversation` or `synthetic`."""
        return self.data / f"{name}_trace.jsonl"


@dataclass(frozen=True, slots=True)
class Claim:
    """One published claim and how it is tried."""

    id: str
    claimed: str
    source: str
    published: str
    reproduced: str
    """Fleet, traffic, policies, seeds, and where they differ from the source's."""
    run: Callable[[Setting], Finding]
    traces: tuple[str, ...] = ()
    """The traces it needs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A claim after its trial; `finding` is None where it wasn't run, and `remark` says why."""

    claim: Claim
    finding: Finding | None
    remark: str = ""

    @property
    def verdict(self) -> Verdict:
        return Verdict.NOT_RUN if self.finding is None else self.finding.verdict


def attempt(claim: Claim, setting: Setting) -> Outcome:
    """Try a claim, unless a trace that it needs isn't there."""
    absent = [str(setting.trace(name)) for name in claim.traces if not setting.trace(name).is_file()]
    if absent:
        return Outcome(claim, None, f"absent: {', '.join(absent)} (name their folder with --data)")
    return Outcome(claim, claim.run(setting))
