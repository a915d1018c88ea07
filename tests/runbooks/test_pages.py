"""The shipped pages are whole, executable, and one for every alert; broken ones are refused with the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from alerts.build import build, known_metrics
from alerts.catalogue import load_catalogue
from alerts.rule import RecordingRule
from documents import DocumentError
from runbooks.page import BEFORE, FOLDER, SECTIONS, Page, load_runbooks, parse_page, shipped_runbooks
from runbooks.promql import evaluate, metric_names
from runbooks.snapshots import Snapshots
from runbooks.steps_text import with_steps

RUNBOOKS = shipped_runbooks()
RECORDED = {
    rule.name for file in build() for group in file.groups for rule in group.rules if isinstance(rule, RecordingRule)
}
STEPS = RUNBOOKS.steps


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    alerts = {alert.name for alert in load_catalogue().alerts}
    assert set(RUNBOOKS.pages) == alerts


@pytest.mark.parametrize("step", STEPS.values(), ids=list(STEPS))
def test_a_step_reads_only_what_the_exporter_writes_or_the_shipped_rules_record(step: object) -> None:
    query = STEPS[step.id].at("5m")  # type: ignore[attr-defined]  # parametrized by steps
    assert metric_names(query) <= set(known_metrics()) | RECORDED


@pytest.mark.parametrize("step_id", [name for name, step in STEPS.items() if BEFORE not in step.query])
def test_a_step_that_does_not_look_back_can_be_asked_without_a_prometheus(step_id: str) -> None:
    assert evaluate(STEPS[step_id].at("5m"), Snapshots()) == []


@pytest.mark.parametrize("step_id", STEPS)
def test_a_step_says_something_of_any_answer(step_id: str) -> None:
    conditions = [reading.when for reading in STEPS[step_id].readings]
    assert "otherwise" in conditions or {"== 0", "== 1"} <= set(conditions)


def test_every_cause_can_be_found_and_can_be_cleared() -> None:
    weights: dict[str, list[int]] = {name: [] for name in RUNBOOKS.causes}
    for step in STEPS.values():
        for reading in step.readings:
            for cause, weight in reading.evidence.items():
                weights[cause].append(weight)
    assert [name for name, found in weights.items() if sum(w for w in found if w > 0) < 3] == []
    assert [name for name, found in weights.items() if not any(w < 0 for w in found)] == []


@pytest.mark.parametrize("page", RUNBOOKS.pages.values(), ids=list(RUNBOOKS.pages))
def test_links_between_pages_lead_somewhere(page: Page) -> None:
    for text in page.sections.values():
        for target in text.split("](")[1:]:
            address = target.split(")")[0]
            if address.endswith(".md") and "/" not in address:
                assert address.removesuffix(".md") in RUNBOOKS.pages


GOOD = """---
alert: SomethingBad
group: cache
steps:
  - id: a-step
    title: A step
    query: prefixwatch_prefix_hit_ratio
    unit: ratio
    readings:
      - {when: otherwise, state: ok, says: Fine.}
---
""" + "\n".join(f"## {section}\n\nText.\n" for section in SECTIONS)


def test_a_page_without_a_section_is_refused() -> None:
    with pytest.raises(DocumentError, match="no text under '## Mitigation'"):
        parse_page(GOOD.replace("## Mitigation\n\nText.\n", ""), "X.md")


def test_a_query_that_is_no_promql_is_refused_with_its_line() -> None:
    with pytest.raises(DocumentError, match=r"X.md:7: steps\[0\].query: .*not PromQL"):
        parse_page(GOOD.replace("prefixwatch_prefix_hit_ratio", "sum(("), "X.md")


def test_a_page_without_front_matter_is_refused() -> None:
    with pytest.raises(DocumentError, match="front matter"):
        parse_page("# Title\n", "X.md")


def test_a_reference_to_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "SomethingBad.md").write_text(GOOD.replace("says: Fine.", "says: Fine., evidence: {gremlins: 3}"))
    (tmp_path / "causes.yaml").write_text("causes: {}\n")
    with pytest.raises(DocumentError, match="no cause 'gremlins'"):
        load_runbooks(tmp_path)


def test_a_page_under_a_wrong_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "Other.md").write_text(GOOD)
    (tmp_path / "causes.yaml").write_text("causes: {}\n")
    with pytest.raises(DocumentError, match="the file's name says 'Other'"):
        load_runbooks(tmp_path)


@pytest.mark.parametrize("alert", RUNBOOKS.pages)
def test_the_steps_that_people_read_are_those_that_are_run(alert: str) -> None:
    text = (FOLDER / f"{alert}.md").read_text(encoding="utf-8")
    assert with_steps(text, alert, RUNBOOKS) == text, "run python -m runbooks.steps_text"
