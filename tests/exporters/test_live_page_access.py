"""The live page can be used by everyone: keyboard, contrast, small screens, hostile and long names."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright, expect

from tests.exporters.live_fleet import APPS, LiveFleet
from tests.exporters.live_site import UPDATE_NOW, Site, busy_fleet, opened

LEAST_CONTRAST = 4.5  # WCAG 2.2 AA, 1.4.3

pytestmark = [pytest.mark.browser, pytest.mark.timeout(90), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def fleet() -> LiveFleet:
    return await busy_fleet()


@pytest_asyncio.fixture(loop_scope="module")
async def site(browser: Browser, fleet: LiveFleet) -> AsyncIterator[Site]:
    async with opened(browser, fleet) as site:
        yield site


async def test_the_keyboard_reaches_everything(site: Site) -> None:
    page = await site.open()
    await page.keyboard.press("Tab")
    await expect(page.get_by_text("Skip to the figures")).to_be_focused()
    reached = []
    for _ in range(40):
        await page.keyboard.press("Tab")
        at = await page.evaluate(
            "((e) => e.id || e.dataset.id && 'box' || e.className || e.textContent)(document.activeElement)"
        )
        reached.append(at)
        if at == "box":
            break
    assert [name for name in reached if name in ("pause", "map-filter", "map-worker", "map-colour", "box")] == [
        "pause", "map-filter", "map-worker", "map-colour", "box",
    ]  # fmt: skip
    first = await page.evaluate("document.activeElement.dataset.id")
    ring = page.locator(f'[data-id="{first}"] .ring')
    assert await ring.evaluate("(e) => getComputedStyle(e).strokeWidth") == "3px"
    await page.keyboard.press("ArrowDown")
    below = await page.evaluate("document.activeElement.getAttribute('aria-level')")
    await page.keyboard.press("Enter")
    await expect(page.locator("#map-path button")).to_have_count(2)
    await expect(page.locator(".box[tabindex='0']")).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(page.locator("#map-path button")).to_have_count(1)
    await page.keyboard.press("Escape")
    await expect(page.locator("#map-path button")).to_have_count(0)
    assert below == "2"


CONTRASTS = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const unseen = element.closest('.hidden, .skip, svg, script, [hidden], option') || !element.checkVisibility();
    if (unseen || !walker.currentNode.textContent.trim()) continue;
    const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(behind(element))];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), walker.currentNode.textContent.trim().slice(0, 40)]);
  }
  for (const box of document.querySelectorAll('.box')) {
    const fill = luminance(parse(getComputedStyle(box.querySelector('.fill')).fill));
    for (const text of box.querySelectorAll('.name, .facts')) {
      const ink = luminance(parse(getComputedStyle(text).fill));
      found.push([(Math.max(ink, fill) + 0.05) / (Math.min(ink, fill) + 0.05), box.getAttribute('aria-label')]);
    }
  }
  return found;
}"""


FILLS = """() => {
  const value = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim().slice(1);
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const luminance = (hex) => [0.2126, 0.7152, 0.0722]
    .reduce((sum, weight, k) => sum + weight * linear(parseInt(hex.slice(2 * k, 2 * k + 2), 16) / 255), 0);
  const ratio = (a, b) => {
    const [x, y] = [luminance(value(a)), luminance(value(b))].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const classes = [0, 1, 2, 3, 4].map((k) => `--ramp-${k}`).concat([0, 1, 2, 3].map((k) => `--copies-${k}`), "--page");
  return classes.map((fill) => [fill, ratio("--on-map", fill)]).concat([["focus", 1.5 * ratio("--focus", "--card")]]);
}"""
"""Contrast of the map's text on each class, and of the focus ring, which needs 3:1 where texts need 4.5:1."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_text_has_contrast(site: Site, fleet: LiveFleet, scheme: str) -> None:
    await fleet.tell(hot="w3", down="w5")
    page = await site.open(color_scheme=scheme)
    for colour in ("hit", "copies"):
        await page.select_option("#map-colour", colour)
        contrasts = await page.evaluate(CONTRASTS)
        assert len(contrasts) > 200
        assert [found for found in contrasts if found[0] < LEAST_CONTRAST] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_all_classes_of_the_map_have_contrast_and_a_pattern_of_their_own(site: Site, scheme: str) -> None:
    page = await site.open(color_scheme=scheme)
    ratios = await page.evaluate(FILLS)
    assert [found for found in ratios if found[1] < LEAST_CONTRAST] == []
    for colour in ("hit", "copies"):
        await page.select_option("#map-colour", colour)
        looks = await page.evaluate(
            "[...document.querySelectorAll('#map-legend rect + rect')].map((pattern) => pattern.getAttribute('fill'))"
        )
        assert len(looks) == len(set(looks)) >= 3


async def test_a_phone_needs_no_sideways_scrolling(site: Site) -> None:
    page = await site.open(viewport={"width": 400, "height": 800})
    assert await page.evaluate("document.documentElement.scrollWidth") <= 400
    small = await page.evaluate(
        "[...document.querySelectorAll('main button, main input, main select')].filter((e) => e.checkVisibility())"
        ".map((e) => [e.id || e.textContent, e.getBoundingClientRect().height]).filter(([name, height]) => height < 24"
        " && name !== 'fleet-doubtful')"
    )
    assert small == []  # WCAG 2.2 AA, 2.5.8; the checkbox's label is part of it


EVIL = '<img src=x onerror="window.taken=1">"><script>window.taken=1</script>'
LONG = "worker-of-the-team-with-the-longest-name-" * 3


@pytest_asyncio.fixture(loop_scope="module")
async def named_site(browser: Browser) -> AsyncIterator[Site]:
    """Targets and prefixes with names that nobody should give."""
    fleet = LiveFleet(workers=6, sessions=200, called=(EVIL, LONG), prefixes=(EVIL, LONG[:100], *APPS[2:4]))
    await fleet.tell()
    fleet.requests(200)
    for _ in range(2):
        await fleet.tell(hot=LONG, down="w3")
    async with opened(browser, fleet) as site:
        yield site


async def test_names_are_shown_and_never_run(named_site: Site) -> None:
    """In the page as it came, in its updates, and in what the script writes of the prefix tree."""
    page = await named_site.open()
    await page.locator("#map-table summary").click()
    await page.locator(".box").first.focus()
    await page.locator("#named").get_by_role("button").first.click()
    await expect(page.locator("#map-path [aria-current]")).to_have_text(EVIL)
    async with page.expect_response(named_site.url + "/"):
        await page.evaluate(UPDATE_NOW)
    await expect(page.locator("#fleet-rows th", has_text="onerror")).to_have_text(EVIL)
    assert await page.locator("img, #map script, #fleet script").count() == 0
    assert await page.evaluate("window.taken") is None


@pytest.mark.parametrize(("width", "hidden"), [(1440, 0), (720, 5)])
async def test_a_long_name_takes_no_figure_out_of_sight(named_site: Site, width: int, hidden: int) -> None:
    """On a desk all columns of the fleet are seen; at half of it, as with a zoom of 200 %, load and state still are."""
    page = await named_site.open(viewport={"width": width, "height": 900})
    await page.locator("#fleet").scroll_into_view_if_needed()
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    beyond = await page.evaluate(
        "(() => { const edge = document.querySelector('.table.tall').getBoundingClientRect().right + 1;"
        " return [...document.querySelector('#fleet').tHead.rows[0].cells]"
        ".filter((cell) => cell.getBoundingClientRect().right > edge).map((cell) => cell.innerText); })()"
    )
    assert len(beyond) <= hidden, beyond
