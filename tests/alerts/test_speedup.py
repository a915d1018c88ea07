"""Rules on a faster clock: each duration a factor shorter, whatever its unit."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.alerts.rule import AlertingRule, RuleGroup
from prefixwatch.alerts.speedup import sped_up

UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def fast(expr: str, hold: str = "1m", factor: float = 2) -> AlertingRule:
    [group] = sped_up([RuleGroup("g", "1m", (AlertingRule("A", expr, hold, {}, {}),))], factor)
    [rule] = group.rules
    assert isinstance(rule, AlertingRule)
    return rule


@pytest.mark.parametrize(
    ("expr", "faster"),
    [
        ("rate(a[100ms])", "rate(a[50ms])"),
        ("rate(a[1m500ms])", "rate(a[30s250ms])"),
        ("sum_over_time(a[59m59s:5m]) > 0", "sum_over_time(a[29m59s500ms:2m30s]) > 0"),
        ("a unless a offset 1h30m", "a unless a offset 45m"),
        ('rate(a{le="[5m]x"}[5m])', 'rate(a{le="[5m]x"}[2m30s])'),
    ],
)
def test_ranges_steps_and_offsets(expr: str, faster: str) -> None:
    assert fast(expr).expr == faster


@given(st.integers(1, 5000), st.sampled_from(sorted(UNITS)), st.integers(1, 100))
def test_a_duration_is_never_longer_nor_lost(count: int, unit: str, factor: int) -> None:
    hold = fast("a", f"{count}{unit}", factor).hold

    made = sum(int(n) * UNITS[u] for n, u in re.findall(r"(\d+)(ms|[smhd])", hold))
    assert made == pytest.approx(count * UNITS[unit] / factor, abs=0.001)
    assert made > 0
