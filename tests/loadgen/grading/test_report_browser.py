"""The report in Chromium: how soon its charts stand, for a fleet of 256 workers, and what its console says."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.async_api import Browser, async_playwright

from prefixwatch.loadgen.grading.summary import RunFacts, build_summary
from prefixwatch.loadgen.report.page import write_report
from prefixwatch.loadgen.request_log.records import RequestRecord
from prefixwatch.slo.build import load_objectives

pytestmark = [pytest.mark.browser, pytest.mark.timeout(90)]

OBJECTIVES = load_objectives(["ttft", "tpot", "goodput", "availability"])
WORKERS = 256


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        await browser.close()


async def test_a_report_of_256_workers_is_drawn_in_full(
    browser: Browser,
    make_log: Callable[..., list[RequestRecord]],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """All of its charts drawn, from a file, light and dark, and on a phone without sideways scrolling."""
    log = [
        replace(record, worker=f"w{record.index % WORKERS}")
        for record in make_log("round_robin", "cache_aware", repeats=2, requests=1024)
    ]
    facts = RunFacts(scenario="shared-prefix", engine="simulated", workers=WORKERS)
    file = tmp_path / "report.html"
    write_report(file, build_summary(log, OBJECTIVES, facts), log, OBJECTIVES, {})
    complaints: list[str] = []
    took = []
    for scheme, width in (("light", 1280), ("dark", 1280), ("light", 400)):
        context = await browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})  # type: ignore[arg-type]  # a literal
        page = await context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        await page.goto(file.as_uri(), wait_until="load")  # charts are drawn by a script of the page, before it
        took.append(await page.evaluate("performance.getEntriesByType('navigation')[0].loadEventStart"))
        charts = await page.locator(".chart").count()
        assert charts >= 5
        assert await page.locator(".chart:has(.main-svg)").count() == charts
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert await page.evaluate("document.documentElement.scrollHeight") <= 5000
        if width == 1280:  # the first screen: verdict, tiles, what to do, and the curve
            for first in (".state", ".tile", ".todo", "#ttft-distribution"):
                assert await page.evaluate(f"document.querySelector('{first}').getBoundingClientRect().bottom") < 900
        await page.click("nav a[href='#charts']")  # a link opens what is folded
        await page.wait_for_function("document.getElementById('hit-tokens').clientWidth > 200")
        await context.close()
    record_property("report_drawn_ms", took)
    print(f"report drawn after {', '.join(f'{ms:.0f}' for ms in took)} ms")
    assert complaints == []


PAGE_PX = 718
"""The width of A4 at 96 dots an inch, less margins of 1 cm."""


async def test_on_paper_nothing_is_cut_off_and_texts_are_dark(
    browser: Browser, make_log: Callable[..., list[RequestRecord]], tmp_path: Path
) -> None:
    """Also when the screen is dark, and wider than the paper."""
    log = make_log("round_robin", "cache_aware", repeats=2, requests=256)
    file = tmp_path / "report.html"
    facts = RunFacts(scenario="shared-prefix", engine="simulated", workers=4)
    write_report(file, build_summary(log, OBJECTIVES, facts), log, OBJECTIVES, {"seed": 1})
    context = await browser.new_context(color_scheme="dark", viewport={"width": 1440, "height": 900})
    page = await context.new_page()
    await page.goto(file.as_uri(), wait_until="load")
    ink = "getComputedStyle(document.querySelector('.chart .xtick text')).fill"
    on_screen = await page.evaluate(ink)

    await page.emulate_media(media="print")
    await page.evaluate("dispatchEvent(new Event('beforeprint'))")
    await page.evaluate(f"document.body.style.width = '{PAGE_PX}px'")

    beyond = await page.evaluate(
        "[...document.querySelectorAll('main *')].filter((e) => e.checkVisibility() && !e.closest('details > *')"
        f" && e.getBoundingClientRect().right > {PAGE_PX} + 1).map((e) => e.tagName + ' ' + e.textContent.slice(0, 40))"
    )
    assert beyond == []
    assert await page.evaluate(ink) == "rgb(0, 0, 0)" != on_screen
    await page.emulate_media(media="screen")
    await page.evaluate("document.body.style.width = ''; dispatchEvent(new Event('afterprint'))")
    async with asyncio.timeout(30):  # Plotly fits a chart to its place in its own time
        while await page.evaluate("document.querySelector('.chart .main-svg').clientWidth") <= PAGE_PX:
            await page.wait_for_timeout(50)
    assert await page.evaluate(ink) == on_screen
    await context.close()
