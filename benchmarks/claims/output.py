"""Outcomes as a table for the terminal, as JSON, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.claims.claim import Outcome, Verdict

_COLOURS = {Verdict.HOLDS: "green", Verdict.IN_PART: "yellow", Verdict.DOES_NOT_HOLD: "red", Verdict.NOT_RUN: "dim"}


def table(outcomes: Sequence[Outcome]) -> Table:
    """One row per claim."""
    rendered = Table("id", "claimed", "published", "here", "checks", "verdict", show_lines=True)
    for outcome in outcomes:
        claim, finding = outcome.claim, outcome.finding
        rendered.add_row(
            claim.id,
            f"{claim.claimed}\n[dim]{claim.source}[/dim]",
            claim.published,
            outcome.remark if finding is None else f"{finding.figures}\n{finding.remark}".strip(),
            "\n".join(_checks(outcome)),
            f"[{_COLOURS[outcome.verdict]}]{outcome.verdict}[/]",
        )
    return rendered


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Everything, JSON-ready."""
    return [
        {
            "id": outcome.claim.id,
            "claimed": outcome.claim.claimed,
            "source": outcome.claim.source,
            "published": outcome.claim.published,
            "reproduced": outcome.claim.reproduced,
            "seeds": outcome.finding.seeds if outcome.finding else None,
            "figures": outcome.finding.figures if outcome.finding else None,
            "checks": [{"expected": c.expected, "holds": c.holds} for c in outcome.finding.checks]
            if outcome.finding
            else [],
            "verdict": outcome.verdict.value,
            "remark": outcome.remark or (outcome.finding.remark if outcome.finding else "") or None,
        }
        for outcome in outcomes
    ]


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The page that `benchmarks/claims/README.md` keeps."""
    lines = [
        "# Published claims, tried on the simulated fleet",
        "",
        "Written by `python -m benchmarks.claims --markdown`. Absolute figures of other people's hardware aren't",
        "expected back: a claim holds here when every check that needs no scale does. What does not hold says so.",
        "",
        "| id | claimed | published | here | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    for outcome in outcomes:
        claim = outcome.claim
        here = outcome.remark if outcome.finding is None else outcome.finding.figures
        lines.append(f"| {claim.id} | {claim.claimed} | {claim.published} | {here} | **{outcome.verdict}** |")
    for outcome in outcomes:
        claim = outcome.claim
        lines += ["", f"## {claim.id}: {outcome.verdict}", "", f"{claim.claimed}. Source: {claim.source}.", ""]
        lines += [f"Here: {claim.reproduced}.", ""]
        if outcome.finding:
            lines += [f"Seeds: {outcome.finding.seeds}.", ""]
        lines += [f"- {line}" for line in _checks(outcome)]
        if outcome.finding and outcome.finding.remark:
            lines += ["", outcome.finding.remark]
    return "\n".join(lines).rstrip() + "\n"


def _checks(outcome: Outcome) -> list[str]:
    if outcome.finding is None:
        return [outcome.remark]
    return [f"{'✓' if check.holds else '✗'} {check.expected}" for check in outcome.finding.checks]
