"""Exporters at one address and the Chromium pages that look at them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from playwright.async_api import Browser, BrowserContext, CDPSession, ConsoleMessage, Page, expect

from tests.exporters.live_fleet import LiveFleet

DRAWN = "#map-box[data-drawn]"
UPDATE_NOW = "window.dispatchEvent(new Event('online'))"
expect.set_options(timeout=30_000)  # a busy machine draws late: what is expected has to come, not soon


class Site:
    """Exporters at one address, and the pages that look at them. Whatever a page's console complains of is kept."""

    def __init__(self, browser: Browser) -> None:
        self.complaints: list[str] = []
        self.may_be_gone = False
        self.url = ""
        self._browser = browser
        self._stack = AsyncExitStack()
        self._contexts: list[BrowserContext] = []
        self._profiler: CDPSession | None = None

    async def serve(self, fleet: LiveFleet) -> None:
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        self.url = await self._stack.enter_async_context(fleet.serving(port))

    async def stop(self) -> None:
        """The exporter goes, its pages stay open."""
        await self._stack.aclose()
        self._stack = AsyncExitStack()

    async def close(self) -> None:
        """Pages first: one that stays open would ask on, and slow down the next test."""
        for context in self._contexts:
            await context.close()
        await self.stop()
        assert self.complaints == []

    async def open(self, wait_for: str = DRAWN, cpu_times: bool = False, **context: Any) -> Page:
        self._contexts.append(await self._browser.new_context(**context))
        page = await self._contexts[-1].new_page()
        if cpu_times:
            self._profiler = await page.context.new_cdp_session(page)
            await self._profiler.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        await page.goto(self.url)
        await page.wait_for_selector(wait_for, state="attached")
        return page

    async def cpu_seconds(self) -> float:
        """CPU time of the thread of the page that was last opened with `cpu_times`."""
        assert self._profiler is not None
        metrics = (await self._profiler.send("Performance.getMetrics"))["metrics"]
        return next(float(each["value"]) for each in metrics if each["name"] == "ThreadTime")

    def _heard(self, message: ConsoleMessage) -> None:
        by_the_browser = message.text.startswith(
            "Failed to load resource:"
        )  # of an exporter, or a prefix, that is gone
        if message.type in ("error", "warning", "trace") and not (by_the_browser and self.may_be_gone):
            self.complaints.append(message.text)


@asynccontextmanager
async def opened(browser: Browser, fleet: LiveFleet) -> AsyncIterator[Site]:
    """A site that serves this fleet; its pages' consoles must have had nothing to complain of."""
    site = Site(browser)
    await site.serve(fleet)
    try:
        yield site
    finally:
        await site.close()


async def busy_fleet() -> LiveFleet:
    """16 workers with a prefix tree and some hundred requests."""
    fleet = LiveFleet(workers=16, sessions=900)
    await fleet.tell()
    fleet.requests(400)
    await fleet.tell()
    return fleet
