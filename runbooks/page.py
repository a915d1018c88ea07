"""Runbook pages and the catalogue of causes: Markdown with YAML front matter → models.

A page explains one alert. Its front matter holds the diagnosis steps that `prefixwatch diagnose` runs; the text is for
people. A step belongs to one page, others point to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from documents import DocumentError, load, parse
from runbooks.promql import QueryError
from runbooks.promql import parse as parse_query
from runbooks.reading import check_condition

FOLDER = Path(__file__).parent
WINDOW = "$window"
"""Stands in queries for the range that a diagnosis looks at."""
BEFORE = "$before"
"""Stands in queries for how far back "some minutes ago" lies: three windows."""

Group = Literal["measurement", "cache", "affinity", "cold prefill", "router", "coupled", "service"]
GROUPS: tuple[Group, ...] = ("measurement", "cache", "affinity", "cold prefill", "router", "coupled", "service")
"""The order of a diagnosis: whether the numbers can be trusted, the five groups of the checklist, what users feel."""

SECTIONS = ("Meaning", "Impact", "Diagnosis", "Mitigation", "Exit condition", "Related panels")


def seconds_of(window: str) -> int:
    """Of a range such as 5m. Raises ValueError for what isn't one."""
    match = re.fullmatch(r"(\d+)([smhd])", window)
    if match is None or not int(match[1]):
        raise ValueError(f"'{window}' is no range such as 5m or 90s")
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[match[2]]


def at(query: str, window: str) -> str:
    """The query over a range such as 5m. Raises ValueError for what isn't one."""
    return query.replace(WINDOW, window).replace(BEFORE, f"{3 * seconds_of(window)}s")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Reading(_Strict):
    """What an answer means. The first reading whose condition holds is the one."""

    when: str = Field(description="absent, otherwise, or comparisons such as '>= 0.6 and < 0.8'")
    state: Literal["ok", "warn", "bad", "unknown"] = Field(description="ok, warn, bad or unknown")
    says: str = Field(min_length=1, description="one sentence for the person who reads it")
    evidence: Mapping[str, int] = Field(default={}, description="cause: weight; below 0 speaks against it")
    next: tuple[str, ...] = Field(default=(), description="alerts whose pages lead on from here")

    _condition = field_validator("when")(check_condition)

    @model_validator(mode="after")
    def _weights_differ_from_zero(self) -> Self:
        if 0 in self.evidence.values():
            raise ValueError("a weight of 0 is no evidence: leave the cause out")
        return self


class Step(_Strict):
    """One question to the metrics."""

    id: str = Field(pattern=r"^[a-z0-9-]+$", description="unique among all pages")
    title: str = Field(min_length=1)
    query: str = Field(
        description="PromQL; $window and $before stand for the range looked at and how far back some minutes ago is"
    )
    unit: Literal["ratio", "seconds", "tokens", "blocks", "requests", "per minute", "factor", "usd", "count", "bool"]
    pick: Literal["max", "min"] = Field(default="max", description="which of several series is read")
    readings: tuple[Reading, ...] = Field(min_length=1)

    @field_validator("query")
    @classmethod
    def _parses(cls, query: str) -> str:
        try:
            parse_query(at(query, "5m"))
        except QueryError as error:
            raise ValueError(str(error)) from error
        return query

    def at(self, window: str) -> str:
        """The query over a range such as 5m."""
        return at(self.query, window)


class FrontMatter(_Strict):
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


class Cause(_Strict):
    """Something that goes wrong in fleets."""

    title: str
    group: Group = Field(description="where in the order of a diagnosis it is looked for")
    alerts: tuple[str, ...] = Field(min_length=1, description="the alerts whose pages tell more")
    mitigation: str
    confirm: str = Field(description="what would prove it")
    refute: str = Field(description="what would disprove it")
    cites: tuple[str, ...] = Field(default=(), description="public reports of it, as owner/repository#number")


class _CauseFile(_Strict):
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
        """The group of the page that a step stands on."""
        return next(page.group for page in self.pages.values() if any(step.id == step_id for step in page.steps))

    def steps_of(self, alert: str) -> tuple[str, ...]:
        """Ids of the steps that a page asks for, its own first."""
        page = self.pages[alert]
        return (*(step.id for step in page.steps), *page.also)

    def _of(self, group: Group) -> Iterable[Page]:
        return (page for page in self.pages.values() if page.group == group)


def parse_page(text: str, name: str) -> Page:
    """Raises DocumentError that names the place."""
    found = re.fullmatch(r"---\n(.*?\n)---\n(.*)", text, flags=re.DOTALL)
    if found is None:
        raise DocumentError(f"{name}:1: expected front matter between two lines '---'")
    front = parse("\n" + found[1], FrontMatter, name=name)  # the empty line keeps line numbers right
    parts = re.split(r"^## (.+)$", found[2], flags=re.MULTILINE)
    sections = {heading.strip(): body.strip() for heading, body in zip(parts[1::2], parts[2::2], strict=True)}
    missing = [heading for heading in SECTIONS if not sections.get(heading)]
    if missing:
        raise DocumentError(f"{name}: no text under '## {missing[0]}': every page has {', '.join(SECTIONS)}")
    return Page(front.alert, front.group, front.steps, front.also, sections)


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
                    f"step '{step.id}' stands on {owners[step.id]}.md too: refer to it with 'also'",
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
    for name, cause_of in runbooks.causes.items():
        for alert in set(cause_of.alerts) - set(runbooks.pages):
            yield "causes.yaml", f"{name}: alerts: there is no page {alert}.md"


@cache
def shipped_runbooks() -> Runbooks:
    """The pages that come with prefixwatch."""
    return load_runbooks()
