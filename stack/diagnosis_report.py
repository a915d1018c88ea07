"""A diagnosis for people: on a terminal, as Markdown for an incident ticket, and as a document for programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from runbooks.diagnosis import Diagnosis, Observation, RankedCause
from runbooks.page import GROUPS, shipped_runbooks

_MARKS = {"ok": "✓", "warn": "!", "bad": "✗", "unknown": "·"}
_COLOURS = {"bad": "red", "warn": "yellow", "ok": "green", "unknown": "bright_black"}
"""By state, in the order in which a group's steps are shown."""
_GROUP_TITLES = {
    "measurement": "Can the numbers be trusted?",
    "cache": "1 Cache health",
    "affinity": "2 Affinity",
    "cold prefill": "3 Cold-prefill economics",
    "router": "4 Router and topology",
    "coupled": "5 Coupled optimisations",
    "service": "What users feel",
}
_OTHER_CAUSES = 3


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
    """The reading's sentence with the value and the series' labels put in."""
    if observation.reading is None:
        return observation.answer.why_absent or "The page says nothing of such an answer."
    answer, step = observation.answer, observation.step
    names = defaultdict(lambda: "one", {**answer.labels, "value": with_unit(answer.value, step.unit)})
    if step.unit in ("requests", "tokens", "blocks", "per minute"):
        names["value"] = with_unit(answer.value, "count")
    return observation.reading.says.format_map(names)


def print_report(diagnosis: Diagnosis, source: str, alert: str | None, firing: Sequence[str], console: Console) -> None:
    """The whole report on a terminal."""
    console.print(_heading(source, alert, firing))
    for group, observations in _by_group(diagnosis.observations):
        console.print()
        console.print(Text(_GROUP_TITLES[group], style="bold"))
        console.print(Padding(_steps_table(observations, alert), (0, 0, 0, 2)))
    console.print()
    console.print(_verdict_panel(diagnosis))


def _heading(source: str, alert: str | None, firing: Sequence[str]) -> Text:
    text = Text.assemble(("Diagnosis", "bold"), (f" from {source}", "bright_black"))
    if alert:
        text.append(f"\nAsked about: {alert} (runbooks/{alert}.md)")
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
    """What is unknown is told in one line at the end, unless the alert asks about it."""
    asked = set(shipped_runbooks().steps_of(alert)) if alert else set()
    table = Table(show_header=False, box=None, padding=(0, 1, 0, 0))
    table.add_column(width=1)
    table.add_column()
    table.add_column(style="bright_black")
    silent = []
    for each in sorted(observations, key=lambda o: list(_COLOURS).index(o.state)):
        if each.state == "unknown" and each.step.id not in asked:
            silent.append(each)
            continue
        colour = _COLOURS[each.state]
        mark = f"[{colour}]{_MARKS[each.state]}[/{colour}]"
        table.add_row(mark, escape(says(each)), escape(each.step.title) if each.state != "ok" else "")
    if silent:
        titles = "; ".join(escape(each.step.title) for each in silent)
        table.add_row("[bright_black]·[/bright_black]", f"[bright_black]Not known: {titles}.[/bright_black]", "")
    return table


def _verdict_panel(diagnosis: Diagnosis) -> Panel:
    found = diagnosis.found
    if found is None:
        colour = "green" if diagnosis.verdict == "nothing wrong" else "yellow"
        lines: list[Text | Table] = [Text(_no_cause(diagnosis))]
        lines += [Text(f"possible: {each.cause.title} ({each.score})") for each in diagnosis.causes[:_OTHER_CAUSES]]
        return Panel(Group(*lines), title=f"[bold]{diagnosis.verdict}[/bold]", border_style=colour, title_align="left")
    cause = found.cause
    rows = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True)
    rows.add_column()
    for each in found.evidence_for:
        rows.add_row("[red]for[/red]", escape(says(each)))
    for each in found.evidence_against:
        rows.add_row("[green]against[/green]", escape(says(each)))
    rows.add_row("", "")
    rows.add_row("[bold]do[/bold]", escape(cause.mitigation.strip()))
    rows.add_row("[bold]confirm[/bold]", escape(cause.confirm))
    rows.add_row("[bold]unless[/bold]", escape(cause.refute))
    rows.add_row("[bold]read[/bold]", escape(", ".join(f"runbooks/{name}.md" for name in cause.alerts)))
    others = diagnosis.causes[1 : 1 + _OTHER_CAUSES]
    if others:
        text = "; ".join(f"{each.cause.title} ({each.score} against {found.score})" for each in others)
        rows.add_row("[bright_black]less likely[/bright_black]", f"[bright_black]{escape(text)}[/bright_black]")
    heading = Text(cause.title, style="bold")
    return Panel(
        Group(heading, Text(""), rows), title="[bold]most likely cause[/bold]", border_style="red", title_align="left"
    )


def _no_cause(diagnosis: Diagnosis) -> str:
    if diagnosis.verdict == "nothing wrong":
        return "No step found anything wrong."
    unknown = sum(each.state == "unknown" for each in diagnosis.observations)
    return (
        f"No cause has enough evidence; {unknown} of {len(diagnosis.observations)} steps had no answer. Look at the "
        "lines marked ✗ and their runbooks, and give the exporter what it lacks (routers, KV events)."
    )


def as_markdown(diagnosis: Diagnosis, source: str, alert: str | None, firing: Sequence[str]) -> str:
    """For an incident ticket: verdict first, then the evidence, then every step with an answer, the worst first."""
    found = diagnosis.found
    lines = [f"## Diagnosis{f' of {alert}' if alert else ''}: {found.cause.title if found else diagnosis.verdict}", ""]
    lines += [f"Source: {source}" + (f". Firing: {', '.join(firing)}." if firing else "."), ""]
    if found:
        lines += _markdown_cause(found)
        lines += [
            f"- less likely: {each.cause.title} ({each.score})" for each in diagnosis.causes[1 : 1 + _OTHER_CAUSES]
        ]
    else:
        lines += [_no_cause(diagnosis)]
    lines += ["", "| | step | value | reading |", "|---|---|---:|---|"]
    known = [each for each in diagnosis.observations if each.state != "unknown"]
    for each in sorted(known, key=lambda o: list(_COLOURS).index(o.state)):
        cells = (_MARKS[each.state], each.step.title, with_unit(each.answer.value, each.step.unit), says(each))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    unknown = [each.step.title for each in diagnosis.observations if each.state == "unknown"]
    if unknown:
        lines += ["", f"Not known: {'; '.join(unknown)}."]
    return "\n".join(lines)


def _markdown_cause(found: RankedCause) -> list[str]:
    return [
        *(f"- for: {says(each)}" for each in found.evidence_for),
        *(f"- against: {says(each)}" for each in found.evidence_against),
        f"- **do**: {found.cause.mitigation.strip()}",
        f"- confirm: {found.cause.confirm}",
        f"- unless: {found.cause.refute}",
        f"- runbooks: {', '.join(f'`runbooks/{name}.md`' for name in found.cause.alerts)}",
    ]


def as_document(diagnosis: Diagnosis, source: str, alert: str | None, firing: Sequence[str]) -> dict[str, Any]:
    """Everything, for `--json`."""
    return {
        "schema": 1,
        "verdict": diagnosis.verdict,
        "source": source,
        "alert": alert,
        "firing": list(firing),
        "causes": [_cause_document(each) for each in diagnosis.causes],
        "steps": [_step_document(each) for each in diagnosis.observations],
    }


def _cause_document(ranked: RankedCause) -> dict[str, Any]:
    return {
        "id": ranked.id,
        "title": ranked.cause.title,
        "score": ranked.score,
        "for": [each.step.id for each in ranked.evidence_for],
        "against": [each.step.id for each in ranked.evidence_against],
        "mitigation": ranked.cause.mitigation.strip(),
        "runbooks": list(ranked.cause.alerts),
    }


def _step_document(each: Observation) -> dict[str, Any]:
    return {
        "id": each.step.id,
        "group": each.group,
        "query": each.step.query,
        "value": each.answer.value,
        "labels": dict(each.answer.labels),
        "state": each.state,
        "reading": says(each),
        **({"why_absent": each.answer.why_absent} if each.answer.value is None else {}),
    }
