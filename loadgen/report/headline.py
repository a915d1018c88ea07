"""The first screen of the report: the verdict in one sentence, four tiles, and where the run was made."""

from __future__ import annotations

from typing import NamedTuple

from prefixwatch.loadgen.grading.comparison import Comparison
from prefixwatch.loadgen.grading.figures import DEFINITIONS, unit_text
from prefixwatch.loadgen.grading.model import PolicyGrade
from prefixwatch.loadgen.grading.summary import Summary, decided, fell_behind, judged_policies
from prefixwatch.loadgen.grading.wording import (
    UNKNOWN,
    effect,
    figure_text,
    limits_text,
    percent,
    signed_percent,
    value_text,
)

TILES = {"ttft_p95": "TTFT p95", "hit_ratio": "Hit tokens", "goodput_rps": "Goodput", "tpot_p95": "TPOT p95"}


class Tile(NamedTuple):
    """One figure in large type. `note` is its change against the baseline, or its sample size."""

    title: str
    value: str
    limits: str
    note: str
    effect: str
    """`better`, `worse` or nothing: the colour of the note."""


def tiles(summary: Summary) -> list[Tile]:
    """Of the judged policy with the lowest TTFT p95; its changes are against the baseline."""
    judged = judged_policies(summary)
    if not judged:
        return []
    name = min(judged, key=lambda each: judged[each].value("ttft_p95") or float("inf"))
    changes = {each.metric: each for each in summary.comparison if each.a == name}
    return [_tile(title, judged[name], figure, changes.get(figure)) for figure, title in TILES.items()]


def _tile(title: str, own: PolicyGrade, name: str, change: Comparison | None) -> Tile:
    text, unit = figure_text(own, name), DEFINITIONS[name].unit
    if text != UNKNOWN and unit != "ratio":
        text += f" {unit_text(unit)}"
    limits = limits_text(own, name)
    if change is None or change.b_value is None:
        count = own.count(name)
        return Tile(title, text, limits, "" if not count else f"{count:,} requests", "")
    found = effect(change)
    before = value_text(change.b_value, unit)
    moved = "no significant change" if found == "not significant" else signed_percent(change.relative)
    return Tile(title, text, limits, f"{moved} from {before}", "" if found == "not significant" else found)


def plain_sentence(summary: Summary) -> str:
    """The verdict as somebody would say it."""
    if not summary.validity.valid:
        reasons = summary.validity.reasons
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        return f"The run is not valid: {reasons[0]}{more}."
    parts = [_of_policy(name, own) for name, own in judged_policies(summary).items()]
    return "; ".join(parts) + "." if parts else "Nothing was measured."


def _of_policy(name: str, own: PolicyGrade) -> str:
    if own.isolation_violations:
        return f"{name} let {own.isolation_violations} requests reuse another tenant's cache"
    missed = [o for o in own.objectives if decided(o) == "fail"]
    undecided = [o for o in own.objectives if decided(o) == "inconclusive"]
    if missed:
        shares = ", ".join(f"{o.name} ({percent(o.measured)} of {percent(o.objective)})" for o in missed)
        return f"{name} misses {len(missed)} of {len(own.objectives)} objectives: {shares}"
    if fell_behind(own):
        achieved, offered = figure_text(own, "achieved_rps"), figure_text(own, "offered_rps")
        return f"{name} fell behind: it completed {achieved} of {offered} requests per second"
    if undecided:
        names = ", ".join(o.name for o in undecided)
        return f"{name} misses no objective, but more requests are needed to decide {names}"
    if not own.objectives:
        return f"{name} was measured without objectives"
    return f"{name} meets {'its objective' if len(own.objectives) == 1 else f'all {len(own.objectives)} objectives'}"


def provenance(summary: Summary) -> list[str]:
    """When, where and with what the run was made, for the head of the page."""
    when = summary.started_at.replace("T", " ").replace("+00:00", " UTC") if summary.started_at else ""
    profile = ""
    if summary.profile:
        profile = f"profile {summary.profile}" + (" (assumed)" if summary.profile.startswith("assumed") else "")
    versions = summary.versions
    shown = [f"{name} {versions[name]}" for name in ("prefixwatch", "python", "platform") if name in versions]
    return [part for part in (when, f"host {summary.host}" if summary.host else "", profile, *shown) if part]
