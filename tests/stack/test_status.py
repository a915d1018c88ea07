"""`prefixwatch status`: one screen from an exporter or a Prometheus, and what it says when neither answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from prefixwatch.exporters.fleet.status import TITLES
from prefixwatch.exporters.metrics_page.families import FAMILIES
from prefixwatch.stack.cli.status import QUERIES, app
from prefixwatch.stack.errors import UsageError
from tests.stack.json_server import JsonAnswers, serving

BLOCK = {
    "schema": 1,
    "targets": {"up": 2, "all": 3},
    "models": {
        "llama": [
            {"name": name, "title": title, "unit": unit, "window": "last 60 s",
             "value": 0.25 if unit in ("ratio", "s") else None, "why": "" if unit in ("ratio", "s") else "no [events]"}
            for name, (title, unit) in TITLES.items()
        ]
    },
}  # fmt: skip


class Answers(JsonAnswers):
    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == "/api/v1/status":
            self.answer(BLOCK)
            return
        query = parse_qs(parts.query)["query"][0]
        labels = {"model": "llama"} if "by (model" in query else {}
        self.answer({"data": {"result": [{"metric": labels, "value": [0, "0.5"]}] if "ttft" not in query else []}})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(Answers) as address:
        yield address


def test_one_screen_from_an_exporter(url: str) -> None:
    shown = CliRunner().invoke(app, ["--exporter", url], env={"COLUMNS": "100"})
    assert shown.exit_code == 0
    for words in ("2 of 3 targets up", "llama", "25.0%", "250 ms", "no [events]", "last 60 s"):
        assert words in shown.output
    assert len(shown.output.splitlines()) <= 40
    assert json.loads(CliRunner().invoke(app, ["--exporter", url, "--json"]).output) == BLOCK


def test_the_same_figures_from_a_prometheus(url: str) -> None:
    document = json.loads(CliRunner().invoke(app, ["--prometheus", url, "--json"]).output)
    figures = {one["name"]: one for one in document["models"]["llama"]}
    assert list(figures) == list(TITLES)
    known = {name for name, one in figures.items() if one["value"] == 0.5}
    assert known == {name for name in TITLES if "ttft" not in name}
    assert figures["ttft_hit_p50"]["why"] == "Prometheus has no such series"


def test_the_queries_use_the_exporters_families() -> None:
    assert set(QUERIES) == set(TITLES)
    names = {family.full_name for family in FAMILIES.values()}
    for query in QUERIES.values():
        words = query.replace("(", " ").replace("{", " ").replace("[", " ").replace(")", " ").split()
        used = {word.removesuffix("_bucket") for word in words if word.startswith("prefixwatch_")}
        assert used
        assert used <= names


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--exporter", "http://127.0.0.1:1"], "--exporter: http://127.0.0.1:1/api/v1/status: "),
        (["--prometheus", "file:///etc/passwd"], "is not an http"),
        (["--exporter", "http://a", "--prometheus", "http://b"], "give either --exporter or --prometheus"),
    ],
)
def test_what_is_wrong_is_one_message(given: list[str], message: str) -> None:
    outcome = CliRunner().invoke(app, given)
    assert isinstance(outcome.exception, UsageError)
    assert message in str(outcome.exception)
