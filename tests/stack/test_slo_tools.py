"""The comparison with other tools' rules: what it asks for, and what it finds in rules of Sloth's form."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.slo_tools import SOURCE, first_alerts, histories, main, sloth_rules

EXAMPLE = """
groups:
- name: records
  rules:
  - record: slo:sli_error:ratio_rate5m
    expr: |
      (sum(rate(http_request_duration_seconds_count{job="myservice",code=~"(5..|429)"}[5m])))
      / (sum(rate(http_request_duration_seconds_count{job="myservice"}[5m])))
- name: alerts
  rules:
  - alert: High
    expr: slo:sli_error:ratio_rate5m > (14.4 * 0.0009999999999999432)
    labels: {sloth_severity: page}
"""
"""One window of the form of Sloth's published example."""


def test_without_other_rules_it_says_where_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert f"curl -o sloth.yml {SOURCE}" in capsys.readouterr().out


def test_another_file_than_sloths_example_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.yml"
    file.write_text("groups: []", encoding="utf-8")

    assert main(["--sloth", str(file)]) == 2
    assert SOURCE in capsys.readouterr().out


@pytest.mark.prometheus
def test_the_examples_query_and_target_become_those_of_our_objective(tmp_path: Path) -> None:
    rules = tmp_path / "sloth.yaml"
    rules.write_text(sloth_rules(EXAMPLE, 0.95), encoding="utf-8")
    [outage] = [history for history in histories() if history.title.startswith("total outage")]

    found = first_alerts(rules, outage, "promtool", tmp_path)

    # 14.4 times 5 % are reached when 72 % of the last 5 minutes are bad: in the fifth minute (rates are extrapolated).
    assert found == {"page": 4}
