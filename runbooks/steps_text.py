"""The diagnosis steps of every page, written out for people below its Diagnosis text.

python -m runbooks.steps_text            # writes them anew; a test fails while a page's are old
"""

from __future__ import annotations

import re
from pathlib import Path

from runbooks.page import FOLDER, Reading, Runbooks, Step, load_runbooks

_BEGIN = "<!-- steps: written from the front matter by `python -m runbooks.steps_text` -->"
_END = "<!-- /steps -->"
_MARKS = {"ok": "✓", "warn": "!", "bad": "✗", "unknown": "·"}
_BLOCK = re.compile(rf"\n*{re.escape(_BEGIN)}.*?{re.escape(_END)}\n", flags=re.DOTALL)


def with_steps(text: str, alert: str, runbooks: Runbooks) -> str:
    """The page's text with its steps in place."""
    head, tail = _BLOCK.sub("\n", text).split("\n## Mitigation\n")
    block = "\n".join([_BEGIN, "", *_lines(alert, runbooks), _END])
    return f"{head.rstrip()}\n\n{block}\n\n## Mitigation\n{tail}"


def _lines(alert: str, runbooks: Runbooks) -> list[str]:
    page = runbooks.pages[alert]
    lines = [f"`prefixwatch diagnose {alert} --prometheus URL` asks all of this.", ""]
    for step in page.steps:
        lines += _step(step)
    owners = {step.id: name for name, each in runbooks.pages.items() for step in each.steps}
    if page.also:
        lines += ["Then, from other pages:", ""]
        lines += [f"- [{runbooks.steps[name].title}]({owners[name]}.md)" for name in page.also]
        lines.append("")
    return lines


def _step(step: Step) -> list[str]:
    lines = [f"**{step.title}**", "", "```promql", step.at("5m"), "```", ""]
    return [*lines, *(_reading(reading) for reading in step.readings), ""]


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
