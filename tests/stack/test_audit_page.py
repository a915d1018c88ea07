"""The page of an audit in Chromium: drawn, light and dark, and on a phone without sideways scrolling."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from playwright.async_api import async_playwright

from prefixwatch.loadgen.audit.document import sealed
from prefixwatch.loadgen.audit.findings import judge
from prefixwatch.loadgen.audit.price import Prices, price
from prefixwatch.loadgen.audit.samples import Arm
from prefixwatch.stack.audit.page import render_audit
from tests.loadgen.audit.test_findings import SETTINGS, samples

pytestmark = [pytest.mark.browser, pytest.mark.timeout(90)]


async def test_the_page_is_drawn_and_fits(tmp_path: Path) -> None:
    measured = samples({Arm.OWN, Arm.CROSS})
    verdict = judge(measured, SETTINGS)
    identity = {"headers": {"x-tenant-id": "<script>alert(1)</script>"}, "cache_salt": "none"}
    document = sealed(
        {
            "target": "http://127.0.0.1:8000",
            "engines": [],
            "model": "tiny",
            "made_at": "2026-11-30T22:00:00+00:00",
            "consent": "not needed: loopback only",
            "victim": identity,
            "attacker": identity,
            "settings": SETTINGS.document(),
            "power": ["Timing: enough."],
            "verdict": verdict.state,
            "statement": verdict.statement,
            "remedies": verdict.remedies,
            "findings": [asdict(finding) for finding in verdict.findings],
            "price": price(measured, Prices()).document(),
            "samples": measured.document(),
        }
    )
    file = tmp_path / "audit.html"
    file.write_text(render_audit(document), encoding="utf-8")
    complaints: list[str] = []
    async with async_playwright() as playwright:
        executable = shutil.which("chromium") or shutil.which("google-chrome")
        browser = await playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for scheme, width in (("light", 1280), ("dark", 1280), ("light", 400)):
            context = await browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})  # type: ignore[arg-type]  # a literal
            page = await context.new_page()
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("dialog", lambda dialog: complaints.append(dialog.message))
            await page.goto(file.as_uri(), wait_until="load")
            assert await page.locator(".chart:has(.main-svg)").count() == 1
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            findings = "document.querySelector('.findings')"
            assert await page.evaluate(f"{findings}.scrollWidth <= {findings}.clientWidth")
            assert await page.inner_text(".state") == "✗ leak"
            assert "unknown" in await page.inner_text("section[aria-labelledby=price]")
            await context.close()
        await browser.close()
    assert complaints == []
