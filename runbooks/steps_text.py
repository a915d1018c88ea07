"""The diagnosis steps of every page, written out for people at the end of its Evidence section.

`python -m prefixwatch.runbooks.steps_text` writes them; a test fails while a page's are out of date.
"""

from __future__ import annotations

import re
from pathlib import Path

from prefixwatch.runbooks.page import FOLDER, Reading, Runbooks, Step, at, load_runbooks

_BEGIN = "<!-- steps: written by `python -m prefixwatch.runbooks.steps_text` from the diagnosis below -->"
_END = "<!-- /steps -->"
_MARKS = {"ok": "✓", "warn": "!", "bad": "✗", "unknown": "?", "n/a": "–"}
_BLOCK = re.compile(rf"\n*{re.escape(_BEGIN)}.*?{re.escape(_END)}\n", flags=re.DOTALL)


def with_steps(text: str, alert: str, runbooks: Runbooks) -> str:
    """The page's text with its steps in place."""
    head, tail = _BLOCK.sub("\n", text).split("\n## Mitigation\n")
    lines = _lines(alert, runbooks)
    block = "\n".join(["", _BEGIN, "", *lines, _END, ""]) if lines else ""
    return f"{head.rstrip()}\n{block}\n## Mitigation\n{tail}"


def _lines(alert: str, runbooks: Runbooks) -> list[str]:
    page = runbooks.pages[alert]
    lines = [line for step in page.steps for line in _step(step)]
    owners = {step.id: name for name, each in runbooks.pages.items() for step in each.steps}
    if page.also:
        lines += ["Then, from other pages:", ""]
        lines += [f"- [{runbooks.steps[name].title}]({owners[name]}.md)" for name in page.also]
        lines.append("")
    return lines


def _step(step: Step) -> list[str]:
    queries = [
        line
        for by, query in step.queries
        for line in (
            *([f"Where that has no answer, by {by}:", ""] if by else []),
            "```promql",
            at(query, "5m"),
            "```",
            "",
        )
    ]
    return [f"**{step.title}**", "", *queries, *(_reading(reading) for reading in step.readings), ""]


def _reading(reading: Reading) -> str:
    condition = reading.when if reading.when in ("absent", "otherwise") else f"`{reading.when}`"
    onward = "".join(f" → [{name}]({name}.md)" for name in reading.next)
    says = re.sub(r"\{(\w+)\}", r"*\1*", reading.says)
    return f"- {_MARKS[reading.state]} {condition}: {says}{onward}"


def main(folder: Path = FOLDER) -> None:
    """Write the steps into every page of a folder."""
    runbooks = load_runbooks(folder)
    for alert in runbooks.pages:
        file = folder / f"{alert}.md"
        file.write_text(with_steps(file.read_text(encoding="utf-8"), alert, runbooks), encoding="utf-8")


if __name__ == "__main__":
    main()
