"""The shipped pages are whole, executable, and one for every alert; broken ones are refused with the place."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from prefixwatch.alerts.build import build, known_metrics
from prefixwatch.alerts.catalogue.model import load_catalogue
from prefixwatch.alerts.rule import RecordingRule
from prefixwatch.documents import DocumentError
from prefixwatch.exporters.config import DEFAULT_LISTEN
from prefixwatch.router.config import RouterConfig
from prefixwatch.runbooks.page import (
    BEFORE,
    FOLDER,
    SECTIONS,
    Page,
    Step,
    at,
    load_runbooks,
    parse_page,
    shipped_runbooks,
)
from prefixwatch.runbooks.promql import evaluate
from prefixwatch.runbooks.snapshots import Snapshots
from prefixwatch.runbooks.steps_text import with_steps
from prefixwatch.slo.promql import metric_names

RUNBOOKS = shipped_runbooks()
RECORDED = {
    rule.name for file in build() for group in file.groups for rule in group.rules if isinstance(rule, RecordingRule)
}
STEPS = RUNBOOKS.steps


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    alerts = {alert.name for alert in load_catalogue().alerts}
    assert set(RUNBOOKS.pages) == alerts


@pytest.mark.parametrize("step", STEPS.values(), ids=list(STEPS))
def test_a_step_reads_only_what_the_exporter_writes_or_the_shipped_rules_record(step: Step) -> None:
    for _, query in step.queries:
        assert set(metric_names(at(query, "5m"))) <= set(known_metrics()) | RECORDED


@pytest.mark.parametrize("step_id", STEPS)
def test_a_step_that_does_not_look_back_can_be_asked_without_a_prometheus(step_id: str) -> None:
    for _, query in STEPS[step_id].queries:
        assert BEFORE in query or evaluate(at(query, "5m"), Snapshots()) == []


@pytest.mark.parametrize("step_id", STEPS)
def test_a_step_says_something_of_any_answer(step_id: str) -> None:
    conditions = [reading.when for reading in STEPS[step_id].readings]
    assert "otherwise" in conditions or {"== 0", "== 1"} <= set(conditions)


def test_every_cause_can_be_found_and_can_be_cleared() -> None:
    for name, cause in RUNBOOKS.causes.items():
        signs = [
            r for group in cause.when for step in group for r in STEPS[step].readings if r.evidence.get(name, 0) > 0
        ]
        assert all(r.state != "unknown" for r in signs), name
        answers = [{r.state for step in group for r in STEPS[step].readings} for group in cause.when]
        assert any("ok" in states for states in answers), name


@pytest.mark.parametrize("page", RUNBOOKS.pages.values(), ids=list(RUNBOOKS.pages))
def test_links_between_pages_lead_somewhere(page: Page) -> None:
    for text in page.sections.values():
        for target in text.split("](")[1:]:
            address = target.split(")")[0]
            if address.endswith(".md") and "/" not in address:
                assert address.removesuffix(".md") in RUNBOOKS.pages


STEPS_TEXT = """<!-- diagnosis
alert: SomethingBad
group: cache
steps:
  - id: a-step
    title: A step
    query: prefixwatch_prefix_hit_ratio
    unit: ratio
    readings:
      - {when: otherwise, state: ok, says: Fine.}
-->
"""
GOOD = "# SomethingBad\n\n" + "\n".join(f"## {section}\n\nText.\n" for section in SECTIONS) + STEPS_TEXT


def test_a_page_without_a_section_is_refused() -> None:
    with pytest.raises(DocumentError, match="no text under '## Mitigation'"):
        parse_page(GOOD.replace("## Mitigation\n\nText.\n", ""), "X.md")


def test_a_query_that_is_no_promql_is_refused_with_its_line() -> None:
    line = GOOD.count("\n", 0, GOOD.index("    query")) + 1
    with pytest.raises(DocumentError, match=rf"X.md:{line}: steps\[0\].query: .*not PromQL"):
        parse_page(GOOD.replace("prefixwatch_prefix_hit_ratio", "sum(("), "X.md")


def test_a_page_without_steps_is_refused() -> None:
    with pytest.raises(DocumentError, match="expected a comment '<!-- diagnosis"):
        parse_page("# Title\n", "X.md")


CAUSE = """causes:
  gremlins:
    {title: Gremlins, group: cache, when: [[%s]], alerts: [SomethingBad], mitigation: m, confirm: c, refute: r}
"""


@pytest.mark.parametrize(
    ("step", "complaint"),
    [
        ("a-step", "gremlins: no reading of a step 'a-step' speaks for it"),
        ("no-step", "gremlins: no reading of a step 'no-step' speaks for it"),
    ],
)
def test_a_cause_that_no_step_can_show_is_refused(tmp_path: Path, step: str, complaint: str) -> None:
    (tmp_path / "SomethingBad.md").write_text(GOOD)
    (tmp_path / "causes.yaml").write_text(CAUSE % step)
    with pytest.raises(DocumentError, match=complaint):
        load_runbooks(tmp_path)


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
    assert with_steps(text, alert, RUNBOOKS) == text, "run python -m prefixwatch.runbooks.steps_text"


SHELL = re.compile(r"```sh\n(.*?)```", flags=re.DOTALL)
QUERIED = re.compile(r"--data-urlencode 'query=(.+?)'")


@pytest.mark.parametrize("page", RUNBOOKS.pages.values(), ids=list(RUNBOOKS.pages))
def test_a_page_begins_with_what_to_do_and_a_command_for_it(page: Page) -> None:
    first, *commands = page.sections["Do now"].split("\n\n")

    assert len(first.split()) <= 40
    assert commands
    assert f"prefixwatch diagnose {page.alert} --prometheus" in page.sections["Do now"]
    assert SHELL.search(page.sections["One worker or the fleet?"])
    assert "Do now" in next(iter(page.sections))


@pytest.mark.parametrize("page", RUNBOOKS.pages.values(), ids=list(RUNBOOKS.pages))
def test_every_command_of_a_page_is_one_that_a_shell_and_prometheus_can_read(page: Page) -> None:
    for text in page.sections.values():
        for block in SHELL.findall(text):
            read = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, check=False)
            assert read.returncode == 0, f"{block}\n{read.stderr}"
            for query in QUERIED.findall(block):
                assert set(metric_names(query)) <= set(known_metrics()) | RECORDED | {"ALERTS"}, query


@pytest.mark.parametrize("page", RUNBOOKS.pages.values(), ids=list(RUNBOOKS.pages))
def test_commands_ask_exporter_and_router_at_the_ports_that_they_listen_on(page: Page) -> None:
    ports = {"exporter": DEFAULT_LISTEN.rpartition(":")[2], "router": str(RouterConfig.model_fields["port"].default)}
    for text in page.sections.values():
        for part, port in re.findall(r"http://(exporter|router):(\d+)", text, flags=re.IGNORECASE):
            assert port == ports[part.lower()]
