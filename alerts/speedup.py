"""The same rules on a faster clock, for drills and tests: names, thresholds and minimums stay."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from prefixwatch.alerts.rule import AlertingRule, Rule, RuleGroup
from prefixwatch.documents.durations import promql, seconds

_DURATION = r"(?:[0-9]+(?:ms|[smhdw]))+"
_IN_EXPRESSION = re.compile(
    rf'(?P<text>"(?:\\.|[^"\\])*")|(?<=\[){_DURATION}(?=[\]:])|(?<=:){_DURATION}(?=\])|(?<=\boffset ){_DURATION}'
)


def sped_up(groups: Sequence[RuleGroup], factor: float) -> list[RuleGroup]:
    """Every range, offset, interval and `for` divided by `factor`. Prometheus must scrape that much more often."""
    return [
        replace(group, interval=_shorter(group.interval, factor), rules=tuple(_rule(r, factor) for r in group.rules))
        for group in groups
    ]


def _rule(rule: Rule, factor: float) -> Rule:
    expr = _IN_EXPRESSION.sub(lambda match: match["text"] or _shorter(match[0], factor), rule.expr)
    if isinstance(rule, AlertingRule):
        return replace(rule, expr=expr, hold=_shorter(rule.hold, factor), keep=_shorter(rule.keep, factor))
    return replace(rule, expr=expr)


def _shorter(duration: str, factor: float) -> str:
    length = seconds(duration)
    return promql(max(length / factor, 0.001) if length else 0)
