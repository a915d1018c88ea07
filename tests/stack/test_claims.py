"""The published claims come back, or the report says that they don't: quick runs of `python -m benchmarks.claims`.

The verdicts asserted are those that the command reports, not those one would wish for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks.claims.catalogue import CLAIMS
from benchmarks.claims.claim import Check, Claim, Finding, Outcome, Setting, Verdict, attempt
from benchmarks.claims.output import as_json, markdown

ROOT = Path(__file__).parents[2]
TRACES = ROOT.parent / "shared" / "data" / "mooncake"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"the public Mooncake traces are not in {TRACES}")


def tried(claim_id: str) -> Outcome:
    return attempt(CLAIMS[claim_id], Setting(TRACES, quick=True))


@pytest.mark.parametrize("claim_id", ["A1", "A20", "A22"])
def test_claims_that_hold(claim_id: str) -> None:
    """production-stack#1035 (RT01), AMD-AGI/Infera#103 (RT04), vllm-project/vllm#53395."""
    outcome = tried(claim_id)
    assert outcome.finding is not None
    assert [check.expected for check in outcome.finding.checks if not check.holds] == []
    assert outcome.verdict is Verdict.HOLDS


@needs_traces
@pytest.mark.parametrize("claim_id", ["A5", "A18"])
def test_claims_that_hold_on_the_public_traces(claim_id: str) -> None:
    """A5 to 0.1 point, the synthetic trace alone; A18 on fewer requests."""
    assert tried(claim_id).verdict is Verdict.HOLDS


def test_what_of_the_claim_on_precise_routing_does_not_hold_is_reported() -> None:
    """With one router and no event lag, approximate knowledge loses nothing; and a miss waits longer at any load."""
    outcome = tried("A8")
    assert outcome.verdict is Verdict.IN_PART
    assert outcome.finding is not None
    assert [check.expected for check in outcome.finding.checks if not check.holds] == [
        "precise serves more than 10 % more than approximate",
        "approximate's TTFT p90 is more than 10 times precise's",
        "below the knee no gap in TTFT p90: within a factor of 2",
    ]


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


def test_the_command() -> None:
    run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)
    found = run([sys.executable, "-m", "benchmarks.claims", "a20", "--quick", "--json"])
    assert [(row["id"], row["verdict"]) for row in json.loads(found.stdout)] == [("A20", "holds")]
    unknown = run([sys.executable, "-m", "benchmarks.claims", "A99"])
    assert unknown.returncode == 2
    assert unknown.stderr.endswith(f"unknown claim 'A99'; known claims: {', '.join(CLAIMS)}\n")
