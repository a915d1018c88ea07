"""Evidence → causes. Pure: answers of the steps in, a verdict out.

A cause is a conjunction of signs in three-valued logic (Kleene): each sign is seen, not seen, or unknown. A cause is
*found* when every group of its `when` has a sign that is seen and none of its `unless` is; it is *excluded* when one of
them makes that impossible; otherwise it stays *open*. The logic is monotone: taking answers away can turn a found or an
excluded cause into an open one and nothing else. So a cause is never named on less than its own evidence, and "nothing
wrong" needs every cause excluded. Weights of readings rank the causes that are found; they never find one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prefixwatch.runbooks.page import GROUPS, Cause, Reading, Runbooks, State, Step
from prefixwatch.runbooks.promql import Sample
from prefixwatch.runbooks.reading import holds

FLEET_SHARE = 0.1
"""A finding that concerns a smaller share of the workers is about those workers, not about the fleet."""

WORKER_LABELS = ("target", "worker")

Verdict = Literal["nothing wrong", "cause found", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a step's query returned: every series with a number, or why there is none."""

    samples: Sequence[Sample] = ()
    why_absent: str = ""
    failed: bool = False
    """Whether the question got no answer at all; then its absence means nothing."""
    by: str = ""
    """What it rests on, where that isn't what the step asks for first."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A step, the series of its answer that it reads, and how that reads."""

    step: Step
    group: str
    reading: Reading | None
    """None where nobody answered, or the page has no reading for such an answer."""
    value: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    why_absent: str = ""
    concerned: int = 0
    """Number of series that this reading holds of."""
    series: int = 0
    by: str = ""
    """What the answer rests on, as in `Answer`."""

    @property
    def state(self) -> State:
        return self.reading.state if self.reading else "unknown"

    def weight(self, cause: str) -> int:
        return self.reading.evidence.get(cause, 0) if self.reading else 0

    @property
    def by_worker(self) -> bool:
        return any(label in self.labels for label in WORKER_LABELS)


@dataclass(frozen=True, slots=True)
class RankedCause:
    """A cause with the signs for and against it, weightiest first."""

    id: str
    cause: Cause
    score: int
    share: float | None
    """Share of the workers that it concerns; None for a cause of the whole fleet."""
    evidence_for: tuple[Observation, ...]
    evidence_against: tuple[Observation, ...]
    missing: tuple[Step, ...]
    """Steps without an answer that keep it open."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The whole result."""

    verdict: Verdict
    observations: tuple[Observation, ...]
    causes: tuple[RankedCause, ...]
    """Causes that are found, the one to act on first."""
    possible: tuple[RankedCause, ...] = ()
    """Open causes with a sign for them, likeliest first."""
    unchecked: tuple[RankedCause, ...] = ()
    """Open causes without a sign: nobody could look for them."""
    unexplained: tuple[Observation, ...] = ()
    """Bad readings that no found cause explains."""
    tied: bool = False
    """Whether the second cause has as much for it as the first."""

    @property
    def found(self) -> RankedCause | None:
        """The cause to act on first."""
        return self.causes[0] if self.causes else None


def observe(step: Step, group: str, answer: Answer) -> Observation:
    """Read an answer: of several series the one that the step picks, and how many read the same."""
    if answer.failed:
        return Observation(step, group, None, why_absent=answer.why_absent)
    if not answer.samples:
        reading = next((each for each in step.readings if holds(each.when, None)), None)
        return Observation(step, group, reading, why_absent=answer.why_absent)
    picked = step.picked(answer.samples)
    reading = _reading(step, picked.value)
    concerned = sum(_reading(step, sample.value) is reading for sample in answer.samples)
    labels = {name: value for name, value in picked.labels.items() if name not in ("__name__", "job", "instance")}
    return Observation(step, group, reading, picked.value, labels, "", concerned, len(answer.samples), answer.by)


def _reading(step: Step, value: float) -> Reading | None:
    return next((each for each in step.readings if holds(each.when, value)), None)


def diagnose(observations: Sequence[Observation], runbooks: Runbooks, alert: str | None = None) -> Diagnosis:
    """Sort the causes into found, possible, unchecked and excluded.

    Causes that the page of `alert` asks about come first, then those of at least `FLEET_SHARE` of the workers, then by
    score.
    """
    signs = _Signs(observations)
    asked = _causes_asked(runbooks, alert)

    def rank(each: RankedCause) -> tuple[bool, bool, int]:
        return each.id not in asked, each.share is not None and each.share < FLEET_SHARE, -each.score

    ranked = [signs.ranked(name, cause, runbooks.steps) for name, cause in runbooks.causes.items()]
    ranked.sort(key=lambda each: (*rank(each), GROUPS.index(each.cause.group)))
    truths = {each.id: signs.truth(each.id, each.cause) for each in ranked}
    found = tuple(each for each in ranked if truths[each.id] is True)
    unknown = [each for each in ranked if truths[each.id] is None]
    possible = tuple(each for each in unknown if each.evidence_for)
    unchecked = tuple(each for each in unknown if not each.evidence_for)
    unexplained = tuple(o for o in observations if o.state == "bad" and not _explained(o, found))
    verdict: Verdict = "nothing wrong"
    if found:
        verdict = "cause found"
    elif unknown or unexplained:
        verdict = "inconclusive"
    tied = len(found) > 1 and rank(found[0]) == rank(found[1])
    return Diagnosis(verdict, tuple(observations), found, possible, unchecked, unexplained, tied)


def _any(truths: Iterable[bool | None]) -> bool | None:
    known = list(truths)
    return True if True in known else None if None in known else False


def _all(truths: Iterable[bool | None]) -> bool | None:
    known = list(truths)
    return False if False in known else None if None in known else True


class _Signs:
    """What the observations say of one cause after another."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        self._observations = observations
        self._by_step = {observation.step.id: observation for observation in observations}
        self._workers = max((o.series for o in observations if o.by_worker), default=0)
        """The size of the fleet: the most workers that any answer has."""

    def truth(self, name: str, cause: Cause) -> bool | None:
        """True: found; False: excluded; None: open."""
        seen = [_any(self._supports(step, name) for step in group) for group in cause.when]
        barred = [self._refutes(step, name) for step in cause.unless]
        return _all([*seen, *(None if each is None else not each for each in barred)])

    def ranked(self, name: str, cause: Cause, steps: Mapping[str, Step]) -> RankedCause:
        weighed = sorted((o for o in self._observations if o.weight(name)), key=lambda o: -abs(o.weight(name)))
        signs = tuple(o for o in weighed if o.weight(name) > 0)
        shares = [self._share(o) for o in signs if o.step.id in cause.steps]
        return RankedCause(
            name,
            cause,
            sum(o.weight(name) for o in weighed),
            min((share for share in shares if share is not None), default=None),
            signs,
            tuple(o for o in weighed if o.weight(name) < 0),
            tuple(steps[step] for step in cause.steps if step in steps and self._answered(step) is None),
        )

    def _answered(self, step: str) -> Observation | None:
        observation = self._by_step.get(step)
        return None if observation is None or observation.state == "unknown" else observation

    def _share(self, observation: Observation) -> float | None:
        """Share of the workers that a reading holds of; None for a figure of the fleet.

        A step that asks about the worst tenth of the workers has its answer from at least that many.
        """
        if not observation.by_worker or observation.step.pick == "tenth":
            return None
        return observation.concerned / self._workers

    def _supports(self, step: str, cause: str) -> bool | None:
        observation = self._answered(step)
        return None if observation is None else observation.weight(cause) > 0

    def _refutes(self, step: str, cause: str) -> bool | None:
        """What one worker of many shows says nothing against a cause of the fleet."""
        observation = self._answered(step)
        if observation is None:
            return None
        share = self._share(observation)
        return observation.weight(cause) < 0 and (share is None or share >= FLEET_SHARE)


def _explained(observation: Observation, found: Sequence[RankedCause]) -> bool:
    """A cause of a few workers explains what is read of workers, not a figure of the fleet."""
    return any(
        observation.weight(each.id) > 0 and (observation.by_worker or each.share is None or each.share >= FLEET_SHARE)
        for each in found
    )


def _causes_asked(runbooks: Runbooks, alert: str | None) -> set[str]:
    """Those that name the alert, and those that a step of its page can be a sign of."""
    if alert is None:
        return set()
    steps = runbooks.steps
    own = {name for name, cause in runbooks.causes.items() if alert in cause.alerts}
    return own | {
        cause
        for step_id in runbooks.steps_of(alert)
        if step_id in steps
        for reading in steps[step_id].readings
        for cause, weight in reading.evidence.items()
        if weight > 0
    }
