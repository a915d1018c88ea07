"""A diagnosis for people: on a terminal, as Markdown for an incident ticket, and as a document for programs.

The answer comes first, then what it rests on, then the steps; steps without an answer are a count per section.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from prefixwatch.runbooks.diagnosis import FLEET_SHARE, Diagnosis, Observation, RankedCause
from prefixwatch.runbooks.page import GROUPS, shipped_runbooks

_MARKS = {"bad": "✗", "warn": "!", "ok": "✓", "unknown": "?", "n/a": "–"}
"""By state, in the order in which a group's steps are shown."""
_COLOURS = {"bad": "red", "warn": "yellow", "ok": "green", "unknown": "bright_black", "n/a": "bright_black"}
_GROUP_TITLES = {
    "measurement": "Can the numbers be trusted?",
    "cache": "1 Cache health",
    "affinity": "2 Affinity",
    "cold prefill": "3 Cold-prefill economics",
    "router": "4 Router and topology",
    "coupled": "5 Coupled optimisations",
    "service": "What users notice",
}
_OTHERS = 3


def with_unit(value: float | None, unit: str) -> str:
    """A value as people write it."""
    if value is None:
        return "–"
    if unit == "ratio":
        return f"{value * 100:.3g} %"
    if unit == "seconds":
        return f"{value:.3g} s" if abs(value) >= 1 else f"{value * 1000:.3g} ms"
    if unit == "bool":
        return "yes" if value else "no"
    if unit == "usd":
        return f"${value:.3g}"
    text = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return text if unit in ("count", "factor") else f"{text} {unit}"


def says(observation: Observation) -> str:
    """The reading's sentence with the value, the series' labels and the number of workers that it holds of."""
    if observation.reading is None:
        return f"No answer: {observation.why_absent}." if observation.why_absent else "No reading for this answer."
    step = observation.step
    names = defaultdict(lambda: "one", {**observation.labels, "value": with_unit(observation.value, step.unit)})
    if step.unit in ("requests", "tokens", "blocks", "per minute"):
        names["value"] = with_unit(observation.value, "count")
    text = observation.reading.says.format_map(names)
    if observation.state in ("bad", "warn") and observation.by_worker and observation.series > 1:
        text += f" ({observation.concerned} of {observation.series} workers)"
    return f"{text.rstrip('.')}, by {observation.by}." if observation.by else text


def scope(cause: RankedCause) -> str:
    """How much of the fleet a cause concerns, in words."""
    if cause.share is None:
        return "the fleet"
    share = f"{cause.share:.0%}" if cause.share >= 0.01 else f"{cause.share:.1%}"
    return f"{share} of the workers" + ("" if cause.share >= FLEET_SHARE else ", not the fleet")


def headline(diagnosis: Diagnosis) -> str:
    """The answer in one line."""
    found = diagnosis.found
    if found is None:
        if diagnosis.verdict == "nothing wrong":
            return "Nothing wrong: every cause was looked for and excluded"
        if diagnosis.possible:
            return f"Inconclusive; possible: {diagnosis.possible[0].cause.title}"
        return "Inconclusive" + ("" if diagnosis.unexplained else ": nothing found wrong in what could be asked")
    if diagnosis.tied:
        return f"{found.cause.title}, or as likely: {diagnosis.causes[1].cause.title}"
    return found.cause.title


def answer_lines(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """The answer as pairs of a word and a sentence: evidence, action, and what stays open."""
    lines: list[tuple[str, str]] = []
    for cause in diagnosis.causes[: 2 if diagnosis.tied else 1]:
        if diagnosis.tied:
            lines.append(("cause", cause.cause.title))
        lines += _cause_lines(cause)
    further = diagnosis.causes[2 if diagnosis.tied else 1 :][:_OTHERS]
    lines += [("also found", f"{each.cause.title} ({scope(each)})") for each in further]
    lines += [("not explained", says(each)) for each in diagnosis.unexplained]
    if diagnosis.verdict == "inconclusive" or diagnosis.unexplained:
        lines += [("possible", _possible(each)) for each in diagnosis.possible[:_OTHERS]]
        if diagnosis.possible and not diagnosis.causes:
            lines.append(("do first", diagnosis.possible[0].cause.mitigation.strip()))
    if diagnosis.unchecked:
        names = "; ".join(each.cause.title for each in diagnosis.unchecked[:_OTHERS])
        more = len(diagnosis.unchecked) - _OTHERS
        count = f"{len(diagnosis.unchecked)} of {len(shipped_runbooks().causes)} causes"
        lines.append(("not checked", f"{count}: {names}{f'; and {more} others' if more > 0 else ''}."))
        lines.append(("needs", "; ".join(_reasons(diagnosis))))
    return lines


def _cause_lines(cause: RankedCause) -> list[tuple[str, str]]:
    return [
        ("concerns", scope(cause)),
        *(("for", says(each)) for each in cause.evidence_for),
        *(("against", says(each)) for each in cause.evidence_against),
        ("do", cause.cause.mitigation.strip()),
        ("confirm", cause.cause.confirm),
        ("unless", cause.cause.refute),
        ("read", ", ".join(f"runbooks/{name}.md" for name in cause.cause.alerts)),
    ]


def _possible(cause: RankedCause) -> str:
    missing = "; ".join(step.title for step in cause.missing)
    return f"{cause.cause.title}. Not known: {missing}."


def _reasons(diagnosis: Diagnosis) -> list[str]:
    """Why steps that would decide have no answer, the commonest reasons first."""
    wanted = {step.id for cause in diagnosis.unchecked for step in cause.missing}
    reasons = Counter(says(o).rstrip(".") for o in diagnosis.observations if o.step.id in wanted)
    return [reason for reason, _ in reasons.most_common(_OTHERS)]


def print_report(diagnosis: Diagnosis, source: str, alert: str | None, firing: Sequence[str], console: Console) -> None:
    """The whole report on a terminal."""
    console.print(_answer_panel(diagnosis))
    console.print(_heading(source, alert, firing))
    for group, observations in _by_group(diagnosis.observations):
        console.print()
        console.print(Text(_GROUP_TITLES[group], style="bold"))
        console.print(Padding(_steps_table(observations, alert), (0, 0, 0, 2)))


def _answer_panel(diagnosis: Diagnosis) -> Panel:
    colour = {"nothing wrong": "green", "cause found": "red", "inconclusive": "yellow"}[diagnosis.verdict]
    rows = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True, style="bold")
    rows.add_column()
    for word, sentence in answer_lines(diagnosis):
        rows.add_row(word, escape(sentence))
    body = Group(Text(headline(diagnosis), style="bold"), *((Text(""), rows) if rows.row_count else ()))
    return Panel(body, title=f"[bold]{diagnosis.verdict}[/bold]", border_style=colour, title_align="left")


def _heading(source: str, alert: str | None, firing: Sequence[str]) -> Text:
    text = Text.assemble(("Asked", "bold"), (f" {source}", "bright_black"))
    if alert:
        text.append(f"\nAbout: {alert} (runbooks/{alert}.md)")
    if firing:
        text.append("\nFiring now: ")
        text.append(", ".join(firing), style="red")
    return text


def _by_group(observations: Iterable[Observation]) -> list[tuple[str, list[Observation]]]:
    groups: dict[str, list[Observation]] = {group: [] for group in GROUPS}
    for observation in observations:
        groups[observation.group].append(observation)
    return [(group, found) for group, found in groups.items() if found]


def _steps_table(observations: Sequence[Observation], alert: str | None) -> Table:
    """Steps without an answer are counted, unless the alert's page asks for them."""
    asked = set(shipped_runbooks().steps_of(alert)) if alert else set()
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0))
    table.add_column(width=1)
    table.add_column()
    table.add_column(style="bright_black")
    folded = 0
    for each in sorted(observations, key=lambda o: list(_MARKS).index(o.state)):
        if each.state in ("unknown", "n/a") and each.step.id not in asked:
            folded += 1
            continue
        colour = _COLOURS[each.state]
        mark = f"[{colour}]{_MARKS[each.state]}[/{colour}]"
        table.add_row(mark, escape(says(each)), escape(each.step.title) if each.state != "ok" else "")
    if folded:
        table.add_row("?", f"[bright_black]{folded} of {len(observations)} without an answer[/bright_black]", "")
    return table


def as_markdown(diagnosis: Diagnosis, source: str, alert: str | None, firing: Sequence[str]) -> str:
    """For an incident ticket: the answer first, then every step with an answer, the worst first."""
    lines = [f"## Diagnosis{f' of {alert}' if alert else ''}: {headline(diagnosis)}", ""]
    lines += [f"- **{word}**: {sentence}" for word, sentence in answer_lines(diagnosis)]
    lines += ["", f"Source: {source}" + (f". Firing: {', '.join(firing)}." if firing else "."), ""]
    lines += ["| | step | value | reading |", "|---|---|---:|---|"]
    known = [each for each in diagnosis.observations if each.state not in ("unknown", "n/a")]
    for each in sorted(known, key=lambda o: list(_MARKS).index(o.state)):
        cells = (_MARKS[each.state], each.step.title, with_unit(each.value, each.step.unit), says(each))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    unknown = len(diagnosis.observations) - len(known)
    if unknown:
        lines += ["", f"{unknown} of {len(diagnosis.observations)} steps had no answer."]
    return "\n".join(lines)


def as_document(diagnosis: Diagnosis, source: str, alert: str | None, firing: Sequence[str]) -> dict[str, Any]:
    """Everything, for `--json`."""
    return {
        "schema": 2,
        "verdict": diagnosis.verdict,
        "answer": headline(diagnosis),
        "source": source,
        "alert": alert,
        "firing": list(firing),
        "tied": diagnosis.tied,
        "causes": [_cause_document(each) for each in diagnosis.causes],
        "possible": [_cause_document(each) for each in diagnosis.possible],
        "unchecked": [_cause_document(each) for each in diagnosis.unchecked],
        "unexplained": [each.step.id for each in diagnosis.unexplained],
        "steps": [_step_document(each) for each in diagnosis.observations],
    }


def _cause_document(ranked: RankedCause) -> dict[str, Any]:
    return {
        "id": ranked.id,
        "title": ranked.cause.title,
        "score": ranked.score,
        "share_of_workers": ranked.share,
        "for": [each.step.id for each in ranked.evidence_for],
        "against": [each.step.id for each in ranked.evidence_against],
        "missing": [step.id for step in ranked.missing],
        "mitigation": ranked.cause.mitigation.strip(),
        "runbooks": list(ranked.cause.alerts),
    }


def _step_document(each: Observation) -> dict[str, Any]:
    return {
        "id": each.step.id,
        "group": each.group,
        "query": next(query for by, query in each.step.queries if by == each.by),
        **({"by": each.by} if each.by else {}),
        "value": each.value,
        "labels": dict(each.labels),
        "concerned": each.concerned,
        "series": each.series,
        "state": each.state,
        "reading": says(each),
        **({"why_absent": each.why_absent} if each.value is None else {}),
    }
