"""The page in a headless Chromium: one picture a dashboard, and what each of its panels showed.

The page's files come from the folder that vite built, by way of the browser's own interception of requests: nothing
listens on a port, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, Route, TimeoutError, ViewportSize, sync_playwright

from prefixwatch.documents import DocumentError
from tests.dashboards.render import BUILT
from tests.dashboards.render.page_input import PAGE_WIDTH

_ORIGIN = "http://dashboards.invalid"
_SETTLE_MILLISECONDS = 30_000
_CELL_PIXELS = 38
_HEAD_PIXELS = 56
_BROWSERS = ("chromium", "google-chrome")


@dataclass(frozen=True, slots=True)
class PanelShown:
    """One panel as the browser drew it; pixels."""

    title: str
    kind: str
    state: str
    """drawn, empty, or not drawn: a visualisation that @grafana/ui doesn't export."""
    width: int
    height: int
    text: str
    title_cut_off: bool
    cut_off: bool
    """Whether bars or columns reach beyond its edge."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One page as the browser drew it."""

    panels: list[PanelShown]
    errors: list[str]
    """Errors of the console, and exceptions that nobody caught."""


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A headless Chromium of this machine. Raises DocumentError when there is none."""
    binary = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if binary is None:
        raise DocumentError("no Chromium on PATH: scripts/install-test-tools installs it on Debian")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        try:
            yield chromium
        finally:
            chromium.close()


def draw(chromium: Browser, page_input: Mapping[str, Any], picture: Path | None, built: Path = BUILT) -> Shown:
    """Draw one page, and write its picture (PNG) if asked to. Raises DocumentError when the page isn't built."""
    if not (built / "index.html").exists():
        raise DocumentError(f"{built} has no page: scripts/install-render builds it")
    page = chromium.new_page(viewport=_view(page_input), timezone_id="UTC", locale="en-US", reduced_motion="reduce")
    try:
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(f"exception: {error}"))
        page.on("console", lambda message: _note(message, errors))
        page.route("**/*", lambda route: _serve(route, built, errors))
        page.add_init_script(f"window.input = {json.dumps(page_input)};")
        page.goto(f"{_ORIGIN}/index.html")
        try:
            page.wait_for_function("window.settled === true", timeout=_SETTLE_MILLISECONDS)
        except TimeoutError:
            return Shown([], [*errors, f"the page isn't drawn after {_SETTLE_MILLISECONDS / 1000:g} s"])
        if picture is not None:
            page.screenshot(path=picture, full_page=True)
        return Shown(_panels(page), errors)
    finally:
        page.close()


def _view(page_input: Mapping[str, Any]) -> ViewportSize:
    """The whole dashboard in view: a table that is out of view stays blank."""
    rows = max((each["place"]["y"] + each["place"]["height"] for each in page_input["panels"]), default=0)
    return {"width": PAGE_WIDTH, "height": _HEAD_PIXELS + int(rows) * _CELL_PIXELS}


def _note(message: ConsoleMessage, errors: list[str]) -> None:
    if message.type == "error":
        errors.append(f"console: {message.text}")


def _serve(route: Route, built: Path, errors: list[str]) -> None:
    address = route.request.url
    file = built / address.removeprefix(f"{_ORIGIN}/").partition("?")[0]
    if address.startswith(_ORIGIN) and file.is_file():
        route.fulfill(path=file)
    elif address.startswith(_ORIGIN) and file.name == "favicon.ico":
        route.fulfill(status=204)
    else:
        errors.append(f"request: {address} isn't part of the page")
        route.abort()


def _panels(page: Page) -> list[PanelShown]:
    reports: list[dict[str, Any]] = page.evaluate("window.report()")
    return [
        PanelShown(
            title=each["title"],
            kind=each["type"],
            state=each["state"],
            width=each["width"],
            height=each["height"],
            text=each["text"],
            title_cut_off=each["titleCutOff"],
            cut_off=each["cutOff"],
        )
        for each in reports
    ]
