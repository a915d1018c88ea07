"""The published claims come back, or the report says that they don't: quick runs, made by `make claims`.

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
from benchmarks.claims.claim import Outcome, Setting, Verdict, attempt

ROOT = Path(__file__).parents[2]
TRACES = ROOT.parent / "shared" / "data" / "mooncake"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"the public Mooncake traces are not in {TRACES}")


def tried(claim_id: str) -> Outcome:
    return attempt(CLAIMS[claim_id], Setting(TRACES, quick=True))


@pytest.mark.parametrize("claim_id", ["A1", "A14", "A20", "A22", "C2", "C3"])
def test_claims_that_hold(claim_id: str) -> None:
    """production-stack#1035 (RT01), CacheGen, AMD-AGI/Infera#103 (RT04), vllm-project/vllm#53395, SGLang HiCache,
    Prefill-as-a-Service."""
    outcome = tried(claim_id)
    assert outcome.finding is not None
    assert [check.expected for check in outcome.finding.checks if not check.holds] == []
    assert outcome.verdict is Verdict.HOLDS


@needs_traces
@pytest.mark.parametrize("claim_id", ["A5", "A18", "C1"])
def test_claims_that_hold_on_the_public_traces(claim_id: str) -> None:
    """A5 to 0.1 point, the synthetic trace alone; A18 and C1 on fewer requests."""
    assert tried(claim_id).verdict is Verdict.HOLDS


def test_what_of_the_claim_on_precise_routing_does_not_hold_is_reported() -> None:
    """With one router its own history is as good as the engines' events; and a miss waits longer at any load."""
    outcome = tried("A8")
    assert outcome.verdict is Verdict.IN_PART
    assert outcome.finding is not None
    assert [check.expected for check in outcome.finding.checks if not check.holds] == [
        "on each of 3 traffics precise serves at least as much as approximate",
        "precise serves more than 10 % more than approximate",
        "approximate's TTFT p90 is more than 10 times precise's",
        "below the knee no gap in TTFT p90: within a factor of 2",
    ]


def test_the_command() -> None:
    run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)
    found = run([sys.executable, "-m", "benchmarks.claims", "a20", "--quick", "--json"])
    assert [(row["id"], row["verdict"]) for row in json.loads(found.stdout)] == [("A20", "holds")]
    unknown = run([sys.executable, "-m", "benchmarks.claims", "A99"])
    assert unknown.returncode == 2
    assert unknown.stderr.endswith(f"unknown claim 'A99'; known claims: {', '.join(CLAIMS)}\n")
