"""What the runbooks' commands ask for exists: addresses are served, metrics are written, series have the labels. And a
page names the line that its alert compares with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import promql_parser as ast
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from prefixwatch.alerts.catalogue.model import THRESHOLDS, read_thresholds
from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.web import web_app
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.policies import make_policy
from prefixwatch.router.records.metrics import RouterMetrics
from prefixwatch.router.serving.create import create_app
from prefixwatch.runbooks.page import Page, shipped_runbooks
from prefixwatch.slo.promql import walk
from tests.alerts.hygiene import ALWAYS, exporter_names
from tests.exporters.live_fleet import LiveFleet

RUNBOOKS = shipped_runbooks()
PAGES = pytest.mark.parametrize("page", RUNBOOKS.pages.values(), ids=list(RUNBOOKS.pages))
FENCED, INLINE = re.compile(r"```sh\n(.*?)```", re.DOTALL), re.compile(r"`((?:curl|kubectl) [^`]+)`")
CALLED = re.compile(r"http://(?P<part>exporter:9477|router:8000|ROUTER(?::8000)?)(?P<path>/[^ '?`]*)")
QUERIED = re.compile(r"--data-urlencode 'query=(.+?)'")
SCRAPED = re.compile(r"http://(?:exporter:9477|router:8000)/metrics \| grep (\w+)")
NAMES = exporter_names({})


def commands(page: Page) -> Iterator[str]:
    """Every line of shell on a page."""
    for text in page.sections.values():
        for block in FENCED.findall(text):
            yield from block.replace("\\\n", " ").splitlines()
        yield from (" ".join(code.split()) for code in INLINE.findall(text))


async def answered(app: web.Application, method: str, path: str) -> bool:
    """Whether an application has a page at this path, for this method."""
    found = await app.router.resolve(make_mocked_request(method, path))
    return found.http_exception is None


async def servers() -> dict[str, web.Application]:
    """Exporter and router, as they are set up to serve."""

    async def reload() -> str:
        return ""

    engine = {"name": "a", "url": "http://127.0.0.1:1"}
    router = create_app(RouterConfig.model_validate({"workers": [engine]}), policy=make_policy("round_robin"))
    return {"exporter": web_app(LiveFleet(workers=1, sessions=0, kv_events=False).exporter, reload), "router": router}


async def test_an_address_of_ours_is_one_that_is_served() -> None:
    apps, called = await servers(), 0
    for page in RUNBOOKS.pages.values():
        for command in commands(page):
            method = re.search(r"-X (\w+)", command)
            given = method[1] if method else "POST" if " -d " in command else "GET"
            for part, path in CALLED.findall(command):
                app = apps[part.partition(":")[0].lower()]
                assert await answered(app, given, path.partition("?")[0]), f"{page.alert}: {command}"
                called += 1

    assert called >= 15


async def test_an_address_that_nobody_serves_is_noticed() -> None:
    apps = await servers()

    assert await answered(apps["router"], "POST", "/router/workers/WORKER/drain")
    assert not await answered(apps["router"], "POST", "/router/workers/WORKER/cordon")
    assert not await answered(apps["exporter"], "GET", "/-/reload")


@PAGES
def test_what_is_looked_for_on_a_metrics_page_is_written_there(page: Page) -> None:
    router = [*shipped_catalogue().get("prefixwatch-router").wanted_names()]
    router += [f"{one.name}_total" for one in RouterMetrics().registry.collect() if one.type == "counter"]
    for command in commands(page):
        for text in SCRAPED.findall(command):
            assert any(text in name for name in router), f"{page.alert}: {command}"


@PAGES
def test_a_query_asks_for_labels_that_its_series_have(page: Page) -> None:
    asked = [query for command in commands(page) for query in QUERIED.findall(command)]
    found = [f"{query}: {fault}" for query in asked for fault in unknown_labels(query)]

    assert found == []


def unknown_labels(query: str) -> Iterator[str]:
    """Labels by which an aggregation splits, and which none of the families in it has."""
    for node, _ in walk(ast.parse(query)):
        if isinstance(node, ast.AggregateExpr) and node.modifier is not None and "By" in str(node.modifier.type):
            names = [str(each.name) for each, _ in walk(node.expr) if isinstance(each, ast.VectorSelector)]
            if names and all(name in NAMES.labels and name != "ALERTS" for name in names):
                known = {label for name in names for label in NAMES.labels[name]} | ALWAYS | {"cluster", "namespace"}
                yield from (f"no label {label}" for label in node.modifier.labels if label not in known)


def test_a_label_that_no_series_has_is_noticed() -> None:
    assert [*unknown_labels("sum by (worker) (rate(prefixwatch_preemptions_total[5m]))")] == ["no label worker"]
    assert [*unknown_labels("sum by (target, cluster) (rate(prefixwatch_preemptions_total[5m]))")] == []


SHARES: dict[float, str] = {0.05: "one .* in twenty", 0.2: "a fifth", 0.5: "half|a factor of two", 0.9: "nine in ten"}
FACTORS: dict[float, str] = {2: "twice", 3: "three times", 6: "three times"}  # an engine comes and goes: two changes
"""Of a threshold in words."""


def ways_to_say(threshold: float) -> str:
    """A pattern: as a share, a number, milliseconds or minutes, or in words."""
    ways = [f"{threshold:,g}", f"{threshold * 100:g} %", f"{threshold * 1000:g} ms", f"{threshold / 60:g} minutes"]
    ways.append(f"{threshold / 1e6:g} MB")
    known = [words[threshold] for words in (SHARES, FACTORS) if threshold in words]
    return "|".join([*(rf"(?<![\d.,]){re.escape(way)}(?![\d.,]*\d)" for way in ways), *known])


@pytest.mark.parametrize(
    ("alert", "threshold"),
    [(name, row.threshold) for name, row in read_thresholds(THRESHOLDS).items() if row.threshold],
)
def test_a_page_names_the_line_that_its_alert_compares_with(alert: str, threshold: float) -> None:
    meaning = " ".join(RUNBOOKS.pages[alert].sections["Meaning"].split())

    assert re.search(ways_to_say(threshold), meaning, re.IGNORECASE), f"{threshold:g} isn't in: {meaning}"
