"""`junit.xml`: one test case per policy and objective, for the test tab of a CI system."""

from __future__ import annotations

from pathlib import Path
from xml.etree.ElementTree import Element, ElementTree, SubElement, indent

from prefixwatch.loadgen.grading.model import ObjectiveGrade, PolicyGrade
from prefixwatch.loadgen.grading.summary import Summary, decided, judged_policies
from prefixwatch.loadgen.grading.wording import figure_text, percent


def junit_tree(summary: Summary) -> Element:
    """One suite per policy. A missed objective of a judged policy is a failure; an undecided one, an invalid run's, or
    the baseline's is skipped, with the reason."""
    root = Element("testsuites", name=f"prefixwatch {summary.scenario}")
    judged = judged_policies(summary)
    for policy, own in summary.policies.items():
        suite = SubElement(root, "testsuite", name=policy)
        _add_properties(suite, own)
        for objective in own.objectives:
            case = SubElement(suite, "testcase", classname=f"{summary.scenario}.{policy}", name=objective.name)
            _add_result(case, summary, objective, judged=policy in judged)
        isolation = SubElement(suite, "testcase", classname=f"{summary.scenario}.{policy}", name="isolation")
        if own.isolation_violations:
            SubElement(
                isolation, "failure", message=f"{own.isolation_violations} requests reused another tenant's cache"
            )
        elif own.isolation_violations is None:
            SubElement(isolation, "skipped", message="unknown: no reuse is reported, or the caches were warm")
        suite.set("tests", str(len(suite.findall("testcase"))))
        for tag in ("failure", "skipped"):
            suite.set("failures" if tag == "failure" else tag, str(len(suite.findall(f"testcase/{tag}"))))
    return root


def write_junit(path: Path, summary: Summary) -> None:
    root = junit_tree(summary)
    indent(root)
    ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _add_properties(suite: Element, own: PolicyGrade) -> None:
    """Figures by request class: properties, because only the objectives as they are written decide."""
    if not own.classes:
        return
    properties = SubElement(suite, "properties")
    for name, found in own.classes.items():
        figures = {
            "requests": f"{found.requests.scheduled}",
            "ttft_p95_ms": figure_text(found, "ttft_p95"),
            "goodput": figure_text(found, "goodput_ratio"),
            **{objective.name: percent(objective.measured) for objective in found.objectives},
        }
        for figure, value in figures.items():
            SubElement(properties, "property", name=f"{name}.{figure}", value=value)


def _add_result(case: Element, summary: Summary, objective: ObjectiveGrade, *, judged: bool) -> None:
    found = f"{objective.rule}: measured {percent(objective.measured)}, {objective.good} of {objective.total}"
    verdict = decided(objective)
    if not summary.validity.valid:
        SubElement(case, "skipped", message="the run is invalid: " + "; ".join(summary.validity.reasons))
    elif verdict == "inconclusive":
        SubElement(case, "skipped", message=f"too few requests to decide: {found}")
    elif verdict == "fail" and not judged:
        SubElement(case, "skipped", message=f"missed by the baseline, which isn't judged: {found}")
    elif verdict == "fail":
        SubElement(case, "failure", message=found)
