"""How the verdict on a published claim is made; `make claims` tries the claims themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.claims.catalogue import CLAIMS
from benchmarks.claims.claim import Check, Claim, Finding, Outcome, Setting, Verdict, attempt
from benchmarks.claims.output import as_json, markdown


def test_a_claim_without_its_trace_is_not_run(tmp_path: Path) -> None:
    for claim in CLAIMS.values():
        if claim.traces:
            outcome = attempt(claim, Setting(tmp_path))
            assert outcome.verdict is Verdict.NOT_RUN
            assert str(tmp_path) in outcome.remark


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [([True, True], Verdict.HOLDS), ([True, False], Verdict.IN_PART), ([False, False], Verdict.DOES_NOT_HOLD)],
)
def test_a_claim_holds_when_every_check_does(checks: list[bool], verdict: Verdict) -> None:
    finding = Finding("figures", tuple(Check(f"check {k}", holds) for k, holds in enumerate(checks)), "seed 1")
    outcome = Outcome(Claim("X1", "claimed", "source", "1 %", "so", lambda _: finding), finding)
    assert outcome.verdict is verdict
    (row,) = as_json([outcome])
    assert row["verdict"] == verdict
    assert [check["holds"] for check in row["checks"]] == checks
    assert f"## X1: {verdict}" in markdown([outcome])
    assert markdown([outcome]).count("✗") == checks.count(False)
