"""Scenarios of alerts → promtool tests: each alert fires, and stays silent where it must.

Of each scenario six tests are made: fires, quiet, low traffic, absent (the exporter runs, the series don't exist), a
counter reset, and a replica that is replaced by a new one. The restart tests take the quiet series: a restart must not
look like trouble. Alerts whose scenarios have the same series are asked together: evaluating the rules is what costs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import yaml
from pydantic import Field, TypeAdapter

from prefixwatch.alerts.build import build
from prefixwatch.alerts.rule import AlertingRule, RuleFile, dump
from prefixwatch.documents.section import Section

SCENARIOS = Path(__file__).parent / "scenarios.yaml"
TESTS = Path(__file__).parent / "tests"

Value = int | float | str
Series = Mapping[str, Value]


class Scenario(Section):
    """What makes one alert fire, and what doesn't."""

    slo: str | None = Field(default=None, description="the SLO whose alert is tested, for alerts of every SLO")
    minutes: int = 60
    every: str = Field(default="1m", description="how often rules are evaluated")
    at: int | None = Field(default=None, description="minute at which it must fire; default: the last")
    firing: list[dict[str, str]] = Field(min_length=1, description="each alert's labels, and its value in words")
    absent: list[dict[str, str]] = Field(default=[], description="the same, when its series don't exist")
    fires: dict[str, Value]
    quiet: dict[str, Value]
    low_traffic: dict[str, Value] | None = None

    def traffic(self) -> str:
        """Equal for scenarios that differ only in what must fire, and when. Those without an exporter's series while
        its alerts are silent differ from those with."""
        return f"{bool(self.absent)} {self.model_dump_json(exclude={'firing', 'absent', 'at'})}"


def load_scenarios() -> dict[str, Scenario]:
    """Scenarios by alert."""
    return TypeAdapter(dict[str, Scenario]).validate_python(yaml.safe_load(SCENARIOS.read_text(encoding="utf-8")))


def rendered(files: Sequence[RuleFile]) -> dict[str, str]:
    """File names and texts of the promtool tests of these rules."""
    head = "# Generated from alerts/scenarios.yaml by `python -m prefixwatch.alerts.scenario`; don't edit.\n"
    asked: dict[str, dict[str, Scenario]] = {}
    for name, scenario in load_scenarios().items():
        asked.setdefault(scenario.traffic(), {})[name] = scenario
    return {f"{next(iter(alike))}.yaml": head + dump(test_document(alike, files)) for alike in asked.values()}


def test_document(alike: Mapping[str, Scenario], files: Sequence[RuleFile]) -> dict[str, Any]:
    """A promtool test file for alerts over the same series, against the rule file that has them."""
    documents = [_document_of_one(name, scenario, files) for name, scenario in alike.items()]
    first, *others = documents
    for other in others:
        for case, same in zip(first["tests"], other["tests"], strict=True):
            case["name"] = f"{case['name'].partition(':')[0]}, {same['name']}"
            case["alert_rule_test"] += same["alert_rule_test"]
    return first


def _document_of_one(name: str, scenario: Scenario, files: Sequence[RuleFile]) -> dict[str, Any]:
    file, rules = _rules(name, scenario, files)
    end = scenario.minutes
    times = sorted({end // 2 + 1, end // 2 + 5, end // 2 + 15, end})
    quiet = scenario.quiet
    low = scenario.low_traffic or {series: _idle(value) for series, value in quiet.items()}
    silent: Mapping[int, list[Any]] = {minute: [] for minute in times}
    fired = [_expected(rules, one) for one in scenario.firing]
    absent = [_expected(rules, one) for one in scenario.absent]
    only_exporter = {} if absent else {'up{job="prefixwatch"}': _samples(1, end)}
    cases = [
        _case(name, "fires", _written(scenario.fires, end), {scenario.at or end: fired}),
        _case(name, "quiet", _written(quiet, end), silent),
        _case(name, "low traffic", _written(low, end), silent),
        _case(name, "absent", only_exporter, {end: absent}),
        _case(name, "counter reset", _reset(quiet, end), silent),
        _case(name, "replica restart", _replaced(quiet, end), silent),
    ]
    return {
        "rule_files": [f"../rules/{file.name}.yaml"],
        "evaluation_interval": scenario.every,
        "group_eval_order": [group.name for group in file.groups],
        "tests": cases,
    }


def _rules(name: str, scenario: Scenario, files: Sequence[RuleFile]) -> tuple[RuleFile, list[AlertingRule]]:
    """The file that has the alert, and its rules there; an alert of every SLO has one for each window."""
    for file in files:
        rules = [r for group in file.groups for r in group.rules if isinstance(r, AlertingRule) and r.name == name]
        if rules and rules[0].labels.get("slo") == scenario.slo:
            return file, rules
    raise KeyError(f"no rule file has {name}" + (f" of the SLO {scenario.slo}" if scenario.slo else ""))


def _case(name: str, title: str, series: Mapping[str, str], expected: Mapping[int, list[Any]]) -> dict[str, Any]:
    return {
        "name": f"{name}: {title}",
        "interval": "1m",
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": alerts} for minute, alerts in expected.items()
        ],
    }


def _expected(rules: Iterable[AlertingRule], firing: Mapping[str, str]) -> dict[str, Any]:
    labels = {key: text for key, text in firing.items() if key != "value"}
    rule = next(r for r in rules if all(r.labels.get(key, text) == text for key, text in labels.items()))
    return {
        "exp_labels": {**rule.labels, **labels},
        "exp_annotations": {key: _filled(text, firing["value"], labels) for key, text in rule.annotations.items()},
    }


def _filled(text: str, value: str, labels: Mapping[str, str]) -> str:
    text = re.sub(r"\{\{ \$value[^}]*\}\}B?", value, text)
    text = re.sub(r"\{\{ \$labels\.(\w+) \| urlquery \}\}", lambda match: quote_plus(labels.get(match[1], "")), text)
    return re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: labels.get(match[1], ""), text)


_INSTANCE = 'instance="%s"'
_COUNTER = re.compile(r"^([0-9.]+)\+([0-9.]+)$")


def _written(series: Series, minutes: int) -> dict[str, str]:
    return {name: _samples(value, minutes) for name, value in series.items()}


def _samples(value: int | float | str, minutes: int) -> str:
    """promtool's notation for `minutes` steps; what is already in it stays."""
    if isinstance(value, str) and not _COUNTER.match(value):
        return value
    return f"{_plain(value)}x{minutes}"


def _from_zero(counter: str) -> str:
    return f"0+{counter.partition('+')[2]}"


def _plain(value: Value) -> str:
    """Without an exponent, which promtool doesn't read."""
    return f"{value:.9f}".rstrip("0") if isinstance(value, float) else str(value)


def _idle(value: Value) -> int | float | str:
    match = _COUNTER.match(value) if isinstance(value, str) else None
    return f"{match[1]}+0" if match else value


def _reset(series: Series, minutes: int) -> dict[str, str]:
    """Counters start again half-way; a gauge is missing for three samples."""
    half = minutes // 2

    def broken(value: Value) -> str:
        if isinstance(value, str) and not _COUNTER.match(value):
            return value
        if isinstance(value, str):
            return f"{value}x{half - 1} {_from_zero(value)}x{half}"
        return f"{_plain(value)}x{half - 1} _x3 {_plain(value)}x{half - 3}"

    return {name: broken(value) for name, value in series.items()}


def _replaced(series: Series, minutes: int) -> dict[str, str]:
    """Half-way one replica ends and another begins from 0, a minute later and under its own name."""
    half = minutes // 2
    made = {}
    for name, value in series.items():
        metric, _, rest = name.partition("{")
        labels = [part for part in rest.removesuffix("}").split(", ") if part and not part.startswith("instance=")]
        old, new = (f"{metric}{{{', '.join([*labels, _INSTANCE % replica])}}}" for replica in ("a", "b"))
        if isinstance(value, str) and not _COUNTER.match(value):
            made[name] = value
            continue
        made[old] = f"{_plain(value)}x{half - 1} stale"
        fresh = _from_zero(value) if isinstance(value, str) else _plain(value)
        made[new] = f"_x{half + 1} {fresh}x{half - 1}"
    return made


def main() -> None:
    """Write the tests of the shipped rules."""
    for name, content in rendered(build()).items():
        (TESTS / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
