"""How many panels have data where only engines' pages are read; docs/dashboards.md says what the others need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.stack.dashboard_stack import short_folder
from tests.stack.engine_panels import Reader, engine_pages, outcomes, panels, with_data

DOCS = Path("docs/dashboards.md")
CAPTURE = Path("tests/exporters/captures/metrics_vllm_0.32.0_default_flags.txt")
ALONE = "the exporter"
"""The row of what a Prometheus alone lacks."""
ALL_IS_WELL = "nothing: empty while all is well"
"""The row of panels that are empty while all is well; whether they are is the engines' business here."""
LEAST = 0.6


def documented() -> dict[str, set[str]]:
    """Panels by the further input that they need."""
    section = DOCS.read_text(encoding="utf-8").partition("## With engines alone")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
    return {need: set(re.findall(r"\*(.+?)\*", titles)) for need, titles in rows if "*" in titles}


def stated(source: str) -> tuple[int, int]:
    """Panels with data, and all panels, as the page says."""
    found = re.search(rf"\| {source} \| (\d+) of (\d+) ", DOCS.read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]), int(found[2])


@pytest.mark.timeout(300)
@pytest.mark.prometheus
@pytest.mark.parametrize(
    ("reader", "source"), [("prometheus", "Prometheus, rules `--from engines`"), ("exporter", "the exporter")]
)
async def test_the_panels_without_data_are_those_that_the_docs_list(reader: Reader, source: str) -> None:
    needs = documented()
    unsure = needs[ALL_IS_WELL]

    with short_folder() as folder:
        async with engine_pages(dict.fromkeys(("vllm-0", "vllm-1"), CAPTURE.read_text(encoding="utf-8"))) as engines:
            found = await outcomes(reader, engines, folder)

    drawn = {panel for panel in with_data(found) if panel[1] not in unsure}
    lacking = {title for _, title in panels(found) - with_data(found)} - unsure
    expected = [titles for need, titles in needs.items() if reader == "prometheus" or not need.startswith(ALONE)]
    assert lacking == set().union(*expected) - unsure
    assert (len(drawn), len(panels(found))) == stated(source)
    assert len(drawn) / len(panels(found)) >= LEAST
