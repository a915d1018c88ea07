"""Evidence → ranked causes. Pure: answers of the steps in, a verdict out.

Every reading gives weights to causes: 4 for a sign that only this cause gives, 2 for one that it shares with few, 1 for
a symptom of many; below 0 for what speaks against it. A cause's score is their sum, and from `DECISIVE` on it is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from runbooks.page import GROUPS, Cause, Reading, Runbooks, Step
from runbooks.reading import holds

DECISIVE = 3
"""A score from which a cause is named: one sign of its own, or several shared ones, and little against it."""

MIN_ANSWERED_RATIO = 0.3
"""With fewer of the steps answered, nothing found doesn't mean that nothing is wrong."""

Verdict = Literal["nothing wrong", "cause found", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a step's query gave: the series to read, or why there is none."""

    value: float | None
    labels: Mapping[str, str]
    series: int = 1
    """How many series there were to pick from."""
    why_absent: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """A step, its answer and how that reads."""

    step: Step
    group: str
    answer: Answer
    reading: Reading | None
    """None where the page has no reading for such an answer."""

    @property
    def state(self) -> str:
        return self.reading.state if self.reading else "unknown"


@dataclass(frozen=True, slots=True)
class RankedCause:
    """A cause with what speaks for and against it, weightiest first."""

    id: str
    cause: Cause
    score: int
    evidence_for: tuple[Observation, ...]
    evidence_against: tuple[Observation, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The whole result; `causes` holds those with any evidence for them, likeliest first."""

    verdict: Verdict
    observations: tuple[Observation, ...]
    causes: tuple[RankedCause, ...]

    @property
    def found(self) -> RankedCause | None:
        """The cause to act on."""
        return self.causes[0] if self.verdict == "cause found" else None


def observe(step: Step, group: str, answer: Answer) -> Observation:
    """The first reading whose condition holds."""
    reading = next((each for each in step.readings if holds(each.when, answer.value)), None)
    return Observation(step, group, answer, reading)


def diagnose(observations: Sequence[Observation], runbooks: Runbooks, alert: str | None = None) -> Diagnosis:
    """Rank the causes by what was observed; with an alert, causes that its page asks about come first among equals."""
    asked = _causes_asked(runbooks, alert)
    ranked = sorted(
        (_weigh(name, cause, observations) for name, cause in runbooks.causes.items()),
        key=lambda r: (-r.score, r.id not in asked, GROUPS.index(r.cause.group)),
    )
    supported = tuple(each for each in ranked if each.evidence_for and each.score > 0)
    return Diagnosis(_verdict(observations, supported), tuple(observations), supported)


def _weigh(name: str, cause: Cause, observations: Iterable[Observation]) -> RankedCause:
    weights = [(o.reading.evidence[name], o) for o in observations if o.reading and name in o.reading.evidence]
    heaviest = sorted(weights, key=lambda pair: -abs(pair[0]))
    return RankedCause(
        name,
        cause,
        sum(weight for weight, _ in weights),
        tuple(o for weight, o in heaviest if weight > 0),
        tuple(o for weight, o in heaviest if weight < 0),
    )


def _verdict(observations: Sequence[Observation], supported: Sequence[RankedCause]) -> Verdict:
    if supported and supported[0].score >= DECISIVE:
        return "cause found"
    answered = sum(o.state != "unknown" for o in observations)
    if any(o.state == "bad" for o in observations) or answered < MIN_ANSWERED_RATIO * len(observations):
        return "inconclusive"
    return "nothing wrong"


def _causes_asked(runbooks: Runbooks, alert: str | None) -> set[str]:
    if alert is None:
        return set()
    steps = runbooks.steps
    return {
        cause
        for step_id in runbooks.steps_of(alert)
        for reading in steps[step_id].readings
        for cause, weight in reading.evidence.items()
        if weight > 0
    }
