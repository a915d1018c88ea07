"""Runbooks are pages of the exporter: an alert's link leads somewhere on every installation."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from prefixwatch.exporters import runbook_pages
from prefixwatch.exporters.live.page import POLICY
from tests.exporters.live_fleet import LiveFleet

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with LiveFleet(workers=1, sessions=0, kv_events=False).serving() as url:
        yield url


async def test_every_runbook_is_served_as_a_page(url: str) -> None:
    files = {path.stem for path in (ROOT / "runbooks").glob("*.md")}
    assert set(runbook_pages.names()) == files
    async with aiohttp.ClientSession() as http:
        for name in sorted(files):
            async with http.get(f"{url}/runbooks/{name}") as answer:
                page = await answer.text()
                assert answer.status == 200
                assert f"<h1>{name}</h1>" in page
                assert "\n---\n" not in page  # what is for programs is left out
                assert answer.headers["Content-Security-Policy"] == POLICY
        async with http.get(f"{url}/runbooks/") as answer:
            index = await answer.text()
    assert all(f'href="/runbooks/{name}"' in index for name in files)


async def test_runbooks_link_to_each_other_and_unknown_ones_are_404(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{url}/runbooks/TargetDown.md") as answer:
            assert answer.status == 200
        for name in ("Nothing", "..%2fpyproject", "TargetDown.yaml"):
            async with http.get(f"{url}/runbooks/{name}") as answer:
                assert answer.status == 404


@pytest.mark.parametrize("name", runbook_pages.names())
def test_every_link_of_a_page_leads_somewhere(name: str) -> None:
    for link in re.findall(r'href="([^"]+)"', runbook_pages._rendered(name)):
        assert link.startswith("https://") or link.removesuffix(".md") in runbook_pages.names(), f"{name}: {link}"


def test_a_file_of_the_repository_is_named() -> None:
    assert "the chain (docs/caches-that-move.md)" in runbook_pages._rendered("ServiceDegraded")


def test_html_in_a_runbook_is_shown_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Evil.md").write_text(
        "---\na: 1\n---\n# Evil\n\n<script>x</script> <!-- hidden -->\n\n| a |\n| - |\n| 1 |\n"
    )
    monkeypatch.setattr(runbook_pages, "_FOLDER", tmp_path)
    page = runbook_pages._rendered("Evil")
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert "hidden" not in page
    assert "<table>" in page
