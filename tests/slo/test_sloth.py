"""What Sloth is given of an SLO, and what it can't be given."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixwatch.documents.errors import InputError
from prefixwatch.slo.build import load_slos
from prefixwatch.slo.read import SHIPPED
from prefixwatch.slo.sloth import losses, specifications
from tests.slo.written import FOREIGN, one

MISS_COST = (SHIPPED / "miss-cost.yaml").read_text(encoding="utf-8")


def test_sloth_gets_the_same_events() -> None:
    specs = specifications(load_slos(["session-hit-rate", "miss-cost", "isolation"]))

    session, miss_cost, isolation = specs["llm-serving"]["slos"]
    assert specs["llm-serving"]["version"] == "prometheus/v1"
    assert session["objective"] == 85
    assert session["sli"]["events"] == {
        "error_query": "(sum(rate(prefixwatch_session_prompt_tokens_total[{{.window}}])) - "
        "(sum(rate(prefixwatch_session_hit_tokens_total[{{.window}}])) or "
        "0 * sum(rate(prefixwatch_session_prompt_tokens_total[{{.window}}]))))",
        "total_query": "sum(rate(prefixwatch_session_prompt_tokens_total[{{.window}}]))",
    }
    assert 'prefixwatch_prefix_miss_cost_ratio_bucket{le="1.5"}' in miss_cost["sli"]["events"]["error_query"]
    assert isolation["sli"]["events"]["error_query"] == (
        '(sum(rate(prefixwatch_isolation_violations_total{kind="cross_tenant_hit"}[{{.window}}])) or '
        "0 * sum(rate(prefixwatch_isolation_audited_requests_total[{{.window}}])))"
    )


def test_what_sloth_is_not_told_is_said(tmp_path: Path) -> None:
    """28 days is a switch of Sloth's command line, so such SLOs have a file of their own."""
    slo = one(tmp_path, FOREIGN)

    assert list(specifications([slo])) == ["web-28d"]
    assert losses([slo]) == [
        "web-availability: its period is 28d: run sloth generate --default-slo-period=28d on its file",
        "web-availability: Sloth has its own burn rates: those of the alertPolicies are left out",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("duration: 30d", "duration: 7d", "miss-cost has a period of 7d, and Sloth has windows for 30d and 28d"),
        ("service: llm-serving", "service: ../llm", "Sloth can't have a service named '../llm'"),
        ("name: miss-cost", "name: m", "Sloth can't have an SLO named 'm': use two or more letters"),
    ],
)
def test_what_sloth_cannot_be_given_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        specifications([one(tmp_path, MISS_COST.replace(old, new))])


def test_what_sloth_cannot_say_is_refused(tmp_path: Path) -> None:
    text = MISS_COST.replace("Occurrences", "Timeslices").replace(
        "target: 0.95", "target: 0.99\n      timeSliceTarget: 0.95\n      timeSliceWindow: 10m"
    )

    with pytest.raises(InputError, match="miss-cost counts time slices; Sloth's format has only events"):
        specifications([one(tmp_path, text)])
