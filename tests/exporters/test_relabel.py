"""Relabelling, as Prometheus documents it: anchored expressions, empty values are no labels."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from prefixwatch.exporters.discovery.relabel import RelabelRule, relabel

POD = {"__address__": "10.0.0.7:8000", "__meta_kubernetes_pod_label_app": "vllm", "__meta_zone": "a"}


def after(*rules: Mapping[str, object], labels: dict[str, str] = POD) -> dict[str, str] | None:
    return relabel(labels, [RelabelRule.model_validate(rule) for rule in rules])


@pytest.mark.parametrize(("regex", "kept"), [("vllm", True), ("vll", False), ("llm", False), (".*l+m", True)])
def test_keep_and_drop_match_the_whole_value(regex: str, kept: bool) -> None:
    rule: dict[str, object] = {"source_labels": ["__meta_kubernetes_pod_label_app"], "regex": regex}
    assert (after(rule | {"action": "keep"}) is not None) == kept
    assert (after(rule | {"action": "drop"}) is None) == kept


def test_replace_joins_its_sources_and_expands_groups() -> None:
    labels = after(
        {
            "source_labels": ["__address__", "__meta_zone"],
            "separator": "@",
            "regex": r"([^:]+)(?::\d+)?@(?P<zone>.*)",
            "target_label": "instance",
            "replacement": "${1}:9100/$zone/$$1/$9",
        }
    )
    assert labels is not None
    assert labels["instance"] == "10.0.0.7:9100/a/$1/"


def test_an_empty_result_removes_the_label() -> None:
    labels = after({"target_label": "__meta_zone", "replacement": ""})
    assert labels is not None
    assert "__meta_zone" not in labels


def test_replace_without_a_match_changes_nothing() -> None:
    assert after({"source_labels": ["missing"], "regex": "x", "target_label": "a", "replacement": "b"}) == POD


def test_labelmap_copies_and_labeldrop_and_labelkeep_remove() -> None:
    labels = after(
        {"action": "labelmap", "regex": "__meta_kubernetes_pod_label_(.+)"},
        {"action": "labeldrop", "regex": "__meta_.*"},
    )
    assert labels == {"__address__": "10.0.0.7:8000", "app": "vllm"}
    assert after({"action": "labelkeep", "regex": "__address__"}) == {"__address__": "10.0.0.7:8000"}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"action": "replace"}, "replace needs target_label"),
        ({"action": "keep"}, "keep needs source_labels"),
        ({"action": "replace", "target_label": "a", "regex": "("}, "is not a regular expression"),
        ({"action": "hashmod", "target_label": "a"}, "Input should be 'replace', 'keep'"),
    ],
)
def test_a_wrong_rule_says_what_is_missing(rule: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message.replace("(", r"\(")):
        RelabelRule.model_validate(rule)


@given(st.dictionaries(st.text("abc_", min_size=1), st.text(), max_size=5), st.text(max_size=20))
def test_no_value_and_no_replacement_is_ever_an_error(labels: dict[str, str], replacement: str) -> None:
    found = after({"source_labels": ["a"], "target_label": "b", "replacement": replacement}, labels=labels)
    assert found is not None
    assert all(found.values())
