"""The table of families: what any page made of it is to a linter and to a strict parser."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from prefixwatch.exporters.metrics_page.families import FAMILIES, Family
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.metrics_page.rows import histograms, rows

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def sampled(family: Family) -> Metric:
    """With one sample, or histogram."""
    labels = ["0.5" if label == "quantile" else "x" for label in family.given]
    if family.kind == "histogram":
        made = histograms(family.name)
        made.add_metric(labels, [("1.0", 1), ("+Inf", 2)], 3.0)
        return made
    plain = rows(family.name)
    plain.add_metric(labels, 1.0)
    return plain


class Told:
    """A source of just these."""

    name = "told"

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        return self._families

    def document(self, now_seconds: float) -> Mapping[str, Any]:
        return {}


def page(families: Iterable[Metric], accept: str = "") -> bytes:
    return render([], accept, [Told(families)])[0]


@pytest.mark.prometheus
def test_promtool_finds_no_fault_in_any_family() -> None:
    text = page(map(sampled, FAMILIES.values()))
    check = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (check.stderr.decode(), check.returncode) == ("", 0)


def test_a_strict_parser_takes_every_family() -> None:
    text = page(map(sampled, FAMILIES.values()), OPENMETRICS).decode()
    families = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    read = {family.name: family.type for family in families if family.name.startswith("prefixwatch_")}
    assert read == {f"prefixwatch_{family.name}": family.kind for family in FAMILIES.values()}


def test_a_delta_that_is_negative_is_still_valid() -> None:
    """Misses may be the quicker ones: a summary's quantiles may not be below 0, an unknown's samples may."""
    delta = rows("ttft_miss_minus_hit_seconds")
    delta.add_metric(["m", "", "", "", "0.5"], -0.25)
    text = page([delta], OPENMETRICS).decode()
    family, *_ = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    assert [(sample.labels, sample.value) for sample in family.samples] == [({"model": "m", "quantile": "0.5"}, -0.25)]
