"""Runbook pages and the catalogue of causes: Markdown with YAML at its end → models.

A page is about one alert. Its text is for people; an HTML comment at its end holds the diagnosis steps that
`prefixwatch diagnose` runs. A step belongs to one page, other pages refer to it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from prefixwatch.documents import DocumentError, durations, load, parse
from prefixwatch.documents.section import Section
from prefixwatch.runbooks.promql import Sample
from prefixwatch.runbooks.reading import check_condition
from prefixwatch.slo.promql import QueryError
from prefixwatch.slo.promql import parse as parse_query

FOLDER = Path(__file__).parent
WINDOW = "$window"
"""The placeholder in queries for the range that a diagnosis looks at."""
BEFORE = "$before"
"""The placeholder in queries for the range that it compares with: twelve windows."""

Group = Literal["measurement", "cache", "affinity", "cold prefill", "router", "coupled", "service"]
GROUPS: tuple[Group, ...] = ("measurement", "cache", "affinity", "cold prefill", "router", "coupled", "service")
"""The order of a diagnosis: whether the numbers can be trusted, the five groups of the checklist, what users feel."""

State = Literal["ok", "warn", "bad", "unknown", "n/a"]
"""`unknown`: nobody measures it, or there was too little traffic; `n/a`: this fleet has no such part."""

SECTIONS = (
    "Do now",
    "One worker or the fleet?",
    "Meaning",
    "Evidence",
    "Mitigation",
    "Exit condition",
    "Escalation",
    "Related panels",
)
"""What every page has, in this order."""

_STEPS = re.compile(r"<!-- diagnosis\n(.*?)-->\s*$", flags=re.DOTALL)


def at(query: str, window: str) -> str:
    """The query over a range such as 5m. Raises ValueError for a text that isn't a duration."""
    return query.replace(WINDOW, window).replace(BEFORE, durations.promql(12 * durations.seconds(window)))


def _parsed(query: str) -> str:
    try:
        parse_query(at(query, "5m"))
    except QueryError as error:
        raise ValueError(str(error)) from error
    return query


class Reading(Section):
    """What an answer means. The first reading whose condition holds is the one."""

    when: str = Field(description="absent, otherwise, or comparisons such as '>= 0.6 and < 0.8'")
    state: State = Field(description="ok, warn, bad, unknown or n/a")
    says: str = Field(min_length=1, description="one sentence for the person who reads it")
    evidence: Mapping[str, int] = Field(default={}, description="cause: weight; below 0 speaks against it")
    next: tuple[str, ...] = Field(default=(), description="alerts whose pages lead on from here")

    _condition = field_validator("when")(check_condition)

    @model_validator(mode="after")
    def _weights_differ_from_zero(self) -> Self:
        if 0 in self.evidence.values():
            raise ValueError("a weight of 0 is not evidence: leave the cause out")
        return self


class Fallback(Section):
    """Another way to the same figure, where its own query has no answer."""

    by: str = Field(min_length=1, description="what it rests on: is said with the answer")
    query: str = Field(description="PromQL, as a step's")

    _parses = field_validator("query")(_parsed)


class Step(Section):
    """One question to the metrics."""

    id: str = Field(pattern=r"^[a-z0-9-]+$", description="unique among all pages")
    title: str = Field(min_length=1)
    query: str = Field(
        description="PromQL; $window is the range looked at, $before the longer one that it is compared with"
    )
    fallback: tuple[Fallback, ...] = Field(default=(), description="asked in turn where the query has no answer")
    unit: Literal["ratio", "seconds", "tokens", "blocks", "requests", "per minute", "factor", "usd", "count", "bool"]
    pick: Literal["max", "min", "tenth"] = Field(
        default="max", description="which of several series is read; tenth: the value that a tenth of them reach"
    )
    readings: tuple[Reading, ...] = Field(min_length=1)

    _parses = field_validator("query")(_parsed)

    @property
    def queries(self) -> tuple[tuple[str, str], ...]:
        """Each with what it rests on, empty for the step's own; in the order in which they are asked until one has an
        answer."""
        return ("", self.query), *((each.by, each.query) for each in self.fallback)

    def picked(self, samples: Sequence[Sample]) -> Sample:
        """The sample that is read, of at least one."""
        ordered = sorted(samples, key=lambda sample: sample.value, reverse=self.pick != "min")
        return ordered[math.ceil(len(ordered) / 10) - 1 if self.pick == "tenth" else 0]


class Steps(Section):
    alert: str = Field(pattern=r"^[A-Za-z0-9]+$")
    group: Group = Field(description=f"one of {', '.join(GROUPS)}")
    steps: tuple[Step, ...] = Field(default=(), description="the steps that this page brings")
    also: tuple[str, ...] = Field(default=(), description="ids of steps on other pages to run as well")


@dataclass(frozen=True, slots=True)
class Page:
    """One runbook page."""

    alert: str
    group: Group
    steps: tuple[Step, ...]
    also: tuple[str, ...]
    sections: Mapping[str, str]
    """Text by heading."""


class Cause(Section):
    """Something that goes wrong in fleets."""

    title: str
    group: Group = Field(description="where in the order of a diagnosis it is looked for")
    when: tuple[tuple[str, ...], ...] = Field(
        min_length=1, description="groups of steps; one of each group must read as a sign of this cause"
    )
    unless: tuple[str, ...] = Field(default=(), description="steps of which none may speak against it")
    alerts: tuple[str, ...] = Field(min_length=1, description="the alerts whose pages say more")
    mitigation: str
    confirm: str = Field(description="what would prove it")
    refute: str = Field(description="what would disprove it")
    cites: tuple[str, ...] = Field(default=(), description="public reports of it, as owner/repository#number")

    @property
    def steps(self) -> tuple[str, ...]:
        """Ids of all steps that decide on it."""
        return (*(step for group in self.when for step in group), *self.unless)


class _CauseFile(Section):
    causes: dict[str, Cause]


@dataclass(frozen=True, slots=True)
class Runbooks:
    """All pages by alert, all causes by id; references among them are whole."""

    pages: Mapping[str, Page]
    causes: Mapping[str, Cause]

    @property
    def steps(self) -> dict[str, Step]:
        """By id, in the order of a diagnosis."""
        return {step.id: step for group in GROUPS for page in self._of(group) for step in page.steps}

    def group_of(self, step_id: str) -> Group:
        """The group of the page that has the step."""
        return next(page.group for page in self.pages.values() if any(step.id == step_id for step in page.steps))

    def steps_of(self, alert: str) -> tuple[str, ...]:
        """Ids of the steps that a page asks for, its own first."""
        page = self.pages[alert]
        return (*(step.id for step in page.steps), *page.also)

    def _of(self, group: Group) -> Iterable[Page]:
        return (page for page in self.pages.values() if page.group == group)


def parse_page(text: str, name: str) -> Page:
    """Raises DocumentError that names the place."""
    found = _STEPS.search(text)
    if found is None:
        raise DocumentError(f"{name}: expected a comment '<!-- diagnosis ... -->' with the steps at the end")
    lines_before = text.count("\n", 0, found.start(1))
    steps = parse("\n" * lines_before + found[1], Steps, name=name)
    parts = re.split(r"^## (.+)$", text[: found.start()], flags=re.MULTILINE)
    sections = {heading.strip(): body.strip() for heading, body in zip(parts[1::2], parts[2::2], strict=True)}
    missing = [heading for heading in SECTIONS if not sections.get(heading)]
    if missing:
        raise DocumentError(f"{name}: no text under '## {missing[0]}': every page has {', '.join(SECTIONS)}")
    return Page(steps.alert, steps.group, steps.steps, steps.also, sections)


def load_runbooks(folder: Path = FOLDER) -> Runbooks:
    """All pages (`<Alert>.md`) and `causes.yaml` of a folder. Raises DocumentError for what doesn't fit together."""
    pages = {}
    for path in sorted(folder.glob("[A-Z]*.md")):
        page = parse_page(path.read_text(encoding="utf-8"), str(path))
        if page.alert != path.stem:
            raise DocumentError(f"{path}: alert: is '{page.alert}', the file's name says '{path.stem}'")
        pages[page.alert] = page
    runbooks = Runbooks(pages, load(folder / "causes.yaml", _CauseFile).causes)
    problems = list(_broken_references(runbooks))
    if problems:
        raise DocumentError("\n".join(f"{folder / place}: {problem}" for place, problem in problems))
    return runbooks


def _broken_references(runbooks: Runbooks) -> Iterable[tuple[str, str]]:
    owners: dict[str, str] = {}
    for page in runbooks.pages.values():
        for step in page.steps:
            if step.id in owners:
                yield (
                    f"{page.alert}.md",
                    f"step '{step.id}' is on {owners[step.id]}.md too: refer to it with 'also'",
                )
            owners[step.id] = page.alert
            for reading in step.readings:
                for cause in set(reading.evidence) - set(runbooks.causes):
                    yield f"{page.alert}.md", f"step '{step.id}': no cause '{cause}' in causes.yaml"
                for alert in set(reading.next) - set(runbooks.pages):
                    yield f"{page.alert}.md", f"step '{step.id}': next: there is no page {alert}.md"
    for page in runbooks.pages.values():
        for step_id in set(page.also) - set(owners):
            yield f"{page.alert}.md", f"also: no page has a step '{step_id}'"
    yield from _broken_causes(runbooks)


def _broken_causes(runbooks: Runbooks) -> Iterable[tuple[str, str]]:
    steps = runbooks.steps
    for name, cause in runbooks.causes.items():
        for alert in set(cause.alerts) - set(runbooks.pages):
            yield "causes.yaml", f"{name}: alerts: there is no page {alert}.md"
        for step_id in cause.steps:
            weights = [r.evidence.get(name, 0) for r in steps[step_id].readings] if step_id in steps else []
            sign = "against" if step_id in cause.unless else "for"
            if not any(weight < 0 if sign == "against" else weight > 0 for weight in weights):
                yield "causes.yaml", f"{name}: no reading of a step '{step_id}' speaks {sign} it"


@cache
def shipped_runbooks() -> Runbooks:
    """The pages that come with prefixwatch."""
    return load_runbooks()
