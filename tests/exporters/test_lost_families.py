"""Whatever family a page loses, no figure of the others becomes 0, best or fine: it is absent, with a reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from prefixwatch.exporters.catalogue.model import Family, Kind, System, shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.fleet.api import fleet_document
from prefixwatch.exporters.scraping.exposition import metric_names
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.target import Target

CAPTURES = (
    *("vllm_0.32.0_data_parallel_2", "vllm_0.32.0_kvconnector", "dynamo-mocker_1.6.1_sgl_w1"),
    *("dynamo-mocker_1.6.1_trt_w1", "dynamo-mocker_1.6.1_kv_w1", "dynamo-frontend_1.6.1_kv"),
    *("smg_1.13.0_cache_aware", "production-stack_0.1.12-14-ga6c01db0_prefixaware"),
)
"""Pages of real processes: of vLLM, SGLang and TensorRT-LLM (both as Dynamo's mocker has them) and of routers."""

WRITTEN = (
    "sglang",
    "tensorrt-llm",
    "triton-tensorrt-llm",
    "tgi",
    "llm-d-epp",
    "llamacpp",
    "vllm",
    "prefixwatch-router",
)
"""Systems whose pages are written from the catalogue: every family, in its first way."""

BEST = {"prefix_hit_ratio": 1.0, "prefix_cache_hit_ratio": 1.0}
OF_ONE_FAMILY = frozenset({"unmapped_label", "duplicate_series"})
"""Flags about a family that end with it; all others are about figures."""

_SAMPLE = re.compile(r"^(?P<series>(?P<name>[\w:]+)(?:\{.*\})?) (?P<value>\S+)$", re.M)
_PARTS = re.compile(r"_(bucket|sum|count|total|created)$")


def family_of(name: str) -> str:
    return _PARTS.sub("", name)


def without(page: str, family: str) -> str:
    return "".join(line for line in page.splitlines(keepends=True) if family_of(_name(line)) != family)


def _name(line: str) -> str:
    words = line.split()
    return words[2] if words[:1] == ["#"] and len(words) > 2 else re.split(r"[{ ]", line)[0]


def before(page: str) -> str:
    """The page when its counters had half of what they have."""

    def halved(match: re.Match[str]) -> str:
        counts = match["name"] in counting or _PARTS.search(match["name"])
        return f"{match['series']} {float(match['value']) / 2}" if counts else match[0]

    counting = set(re.findall(r"(?m)^# TYPE (\S+) counter", page))
    return _SAMPLE.sub(halved, page)


def figures(page: str, system: str) -> dict[str, Any]:
    """What the API says of a target whose page this is, after two scrapes."""
    config = TargetConfig(name="a", url="http://localhost/metrics", system=system)
    target = Target(config, ExporterConfig(targets=(config,)), shipped_catalogue())
    for at, text in enumerate((before(page), page)):
        target.ingest(Scrape(0.01, text.encode()), 5.0 * at)
    assert target.up, (target.reason, target.detail)
    document = fleet_document([target], 5.0)
    return {**document["targets"][0], "fleet": document["fleet"]}


def flat(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def written(system: System) -> str:
    """A page with every signal, each of its families as its system's first source has it."""
    lines: dict[str, None] = {}
    for number, signal in enumerate(system.signals.values()):
        for family in signal.sources[0].families:
            labels = {rule.source: "0" for rule in (*signal.labels.values(), *family.labels.values()) if rule.source}
            lines.update(dict.fromkeys(_lines(family, signal.kind, signal.unit, {**labels, **family.only}, number)))
    return "\n".join([*lines, ""])


def _lines(family: Family, kind: Kind, unit: str, labels: Mapping[str, str], number: int) -> Iterator[str]:
    def series(suffix: str, value: float, **more: str) -> str:
        inner = ",".join(f'{name}="{text}"' for name, text in {**labels, **more}.items())
        return f"{family.name}{suffix}{{{inner}}} {value}"

    if family.buckets_from:
        yield series("", 400.0, **{family.buckets_from: "5-10"})
    elif kind == "histogram":
        counts = {"0.1": 100.0, "1.0": 300.0, "10.0": 390.0, "+Inf": 400.0}
        yield from (series("_bucket", count, le=bound) for bound, count in counts.items())
        yield from (series("_count", 400.0), series("_sum", 500.0))
    elif kind == "counter":
        yield f"# TYPE {family.name} counter"
        yield series("", 400.0 if unit == "requests" else 40_000.0 + 10 * number)
    else:
        yield series("", 0.4 / family.scale if unit == "ratio" else 3.0)


@pytest.mark.parametrize("name", [*CAPTURES, *WRITTEN])
def test_a_lost_family_makes_no_figure_0_best_or_fine(name: str, capture: Callable[[str], bytes]) -> None:
    catalogue = shipped_catalogue()
    page = written(catalogue.get(name)) if name in WRITTEN else capture(name).decode()
    system = catalogue.get(name) if name in WRITTEN else catalogue.detect(metric_names(page.encode()))
    assert system is not None
    whole = figures(page, system.system)
    known = dict(flat(whole["derived"] | {"fleet": whole["fleet"]}))
    read = {family_of(name) for name in system.wanted_names()}
    on_page = {family_of(match["name"]) for match in _SAMPLE.finditer(page)}
    assert len(read & on_page) >= 2
    for family in sorted(read & on_page):
        left = figures(without(page, family), system.system)
        for figure, value in flat(left["derived"] | {"fleet": left["fleet"]}):
            if not isinstance(value, float):
                continue
            was = known.get(figure)
            assert value != 0.0 or was == 0.0, f"{family}: {figure} became 0"
            assert value != BEST.get(figure) or was == value, f"{family}: {figure} became best"
        gone = set(whole["derived"]) - set(left["derived"])
        assert not gone or left["absent"] != whole["absent"], f"{family}: {gone} without a reason"
        fine = [flag for flag, raised in whole["flags"].items() if raised and left["flags"].get(flag) is False]
        assert set(fine) <= OF_ONE_FAMILY, f"{family}: {fine} no longer raised"
