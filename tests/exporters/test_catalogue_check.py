"""A catalogue file of one's own against a page: what it maps, what it leaves, what looks wrong."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from prefixwatch.documents import DocumentError
from prefixwatch.exporters.catalogue.check import Check, check
from prefixwatch.exporters.catalogue.model import load_catalogue, parse_system, shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.errors import ExporterError
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.stack.cli.catalogue import run_check
from prefixwatch.stack.cli.main import app

Capture = Callable[[str], bytes]

OURS = """\
system: ours
title: Our engine
role: engine
detect: {any_of: [our_running]}
signals:
  running_requests: {kind: gauge, unit: requests, required: true, sources: [{families: [our_running]}]}
  prefix_query_tokens: {kind: counter, unit: tokens, required: true, sources: [{families: [our_prompt_tokens_total]}]}
  prefix_hit_tokens:
    kind: counter
    unit: tokens
    labels: {model: model_name}
    sources: [{families: [our_cached_tokens_total]}]
  ttft_seconds: {kind: histogram, unit: seconds, sources: [{families: [our_ttft_ms]}]}
"""

PAGE = b"""\
# TYPE our_running gauge
our_running 3
# TYPE our_prompt_tokens_total counter
our_prompt_tokens_total{model="m"} 1000
# TYPE our_cached_tokens_total counter
our_cached_tokens_total{model="m"} 400
# TYPE our_ttft_ms histogram
our_ttft_ms_bucket{le="250"} 9
our_ttft_ms_bucket{le="+Inf"} 10
our_ttft_ms_sum 1500
our_ttft_ms_count 10
# TYPE our_power_watts gauge
our_power_watts 5
process_start_time_seconds 1
our_cached_tokens_created 1.7e9
"""


def checked(text: str = OURS, page: bytes = PAGE) -> Check:
    return check(parse_system(text, "ours.yaml"), page, shipped_catalogue())


def test_what_it_maps_and_what_it_leaves() -> None:
    found = checked()
    assert [(one.signal, one.families, one.series, one.value) for one in found.mapped] == [
        ("running_requests", ("our_running",), 1, 3.0),
        ("prefix_query_tokens", ("our_prompt_tokens_total",), 1, 1000.0),
        ("prefix_hit_tokens", ("our_cached_tokens_total",), 1, 400.0),
        ("ttft_seconds", ("our_ttft_ms",), 4, 10.0),
    ]
    assert dict(found.unused) == {"our_power_watts": "gauge"}
    assert (found.detected, found.also, dict(found.unmatched)) == (True, (), {})


def test_a_label_that_no_sample_has_and_a_unit_that_the_name_contradicts() -> None:
    found = checked()
    assert found.warnings == (
        "prefix_hit_tokens: our_cached_tokens_total has no label 'model_name' for 'model'; its labels are model",
        "ttft_seconds: our_ttft_ms doesn't look like seconds; does it need scale: 0.001?",
    )
    assert not found.ok


def test_the_mended_file_is_fine() -> None:
    mended = OURS.replace("model_name", "model").replace("[our_ttft_ms]", "[{name: our_ttft_ms, scale: 0.001}]")
    assert checked(mended).ok


@pytest.mark.parametrize(
    ("old", "new", "warning"),
    [
        ("[our_running]}]}", "[our_runing]}]}", "running_requests: required, and none of its families is on the page"),
        (
            "families: [our_running]",
            "families: [{name: our_running, only: {rank: '1'}}]",
            "running_requests: no sample of our_running has the labels of 'only'; values of rank: ",
        ),
    ],
)
def test_other_mistakes(old: str, new: str, warning: str) -> None:
    assert any(warning in line for line in checked(OURS.replace(old, new)).warnings)


def test_more_hits_than_lookups_and_a_ratio_above_one() -> None:
    page = PAGE.replace(b'our_cached_tokens_total{model="m"} 400', b'our_cached_tokens_total{model="m"} 4000')
    text = OURS.replace("running_requests: {kind: gauge, unit: requests", "kv_usage_ratio: {kind: gauge, unit: ratio")
    warnings = checked(text, page).warnings
    assert "kv_usage_ratio: a ratio of 3, not between 0 and 1; is it in percent?" in warnings
    assert "prefix_hit_tokens: 4000, more than the 1000 tokens looked up" in warnings


def test_a_file_that_also_matches_a_shipped_system() -> None:
    found = checked(OURS.replace("our_running]}\nsignals", "'vllm:num_requests_running']}\nsignals"),
                    PAGE + b"vllm:num_requests_running 1\n")  # fmt: skip
    assert (found.detected, found.also, found.ok) == (True, ("vllm",), False)


@pytest.mark.parametrize("system", ["vllm", "mooncake-master", "ray-serve", "smg"])
def test_shipped_files_find_nothing_wrong_with_their_captures(capture: Capture, system: str) -> None:
    page = {"vllm": "vllm_0.32.0", "mooncake-master": "mooncake-master_0.3.13.post1", "ray-serve": "ray-serve_2.60.0",
            "smg": "smg_1.13.0_cache_aware"}[system]  # fmt: skip
    catalogue = shipped_catalogue()
    assert check(catalogue.get(system), capture(page), catalogue).ok


# A folder of one's own


def test_a_users_folder_comes_first(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(OURS)
    (tmp_path / "vllm.yaml").write_text(OURS.replace("system: ours", "system: vllm").replace("Our engine", "Patched"))
    catalogue = load_catalogue(tmp_path)
    assert catalogue.get("vllm").title == "Patched"
    found = catalogue.detect(frozenset({"our_running", "vllm:num_requests_running"}))
    assert found is not None
    assert found.system == "ours"
    assert "sglang" in catalogue.names


def test_the_exporter_reads_the_folder_that_its_configuration_names(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(OURS)
    target = TargetConfig(name="a", url="http://localhost/metrics")
    (made,) = Exporter(ExporterConfig(targets=(target,), catalogue=tmp_path)).targets
    made.ingest(Scrape(0.01, PAGE), 0.0)
    assert made.system is not None
    assert (made.system.system, made.up) == ("ours", True)


def test_a_wrong_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(OURS.replace("unit: tokens, required", "units: tokens, required"))
    with pytest.raises(DocumentError, match=r"ours\.yaml:7: signals\.prefix_query_tokens"):
        load_catalogue(tmp_path)


def test_a_folder_that_isnt_there(tmp_path: Path) -> None:
    with pytest.raises(ExporterError, match="no such folder"):
        load_catalogue(tmp_path / "gone")
    with pytest.raises(ExporterError, match=r"no \*\.yaml in it"):
        load_catalogue(tmp_path)


def test_ranges_are_for_histograms_only() -> None:
    wrong = OURS.replace("families: [our_running]", "families: [{name: our_running, buckets_from: bucket}]")
    with pytest.raises(DocumentError, match=r"'buckets_from' of our_running is for histograms, .* is a gauge"):
        parse_system(wrong, "ours.yaml")


# The command


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(OURS)
    (tmp_path / "page.txt.gz").write_bytes(gzip.compress(PAGE))
    arguments = [
        "exporter",
        "catalogue",
        "check",
        str(tmp_path / "ours.yaml"),
        "--against",
        str(tmp_path / "page.txt.gz"),
    ]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 1
    assert "does it need scale: 0.001?" in shown.output
    assert "our_power_watts (gauge)" in shown.output
    document = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert (document["schema"], document["ok"], document["unused"]) == (1, False, {"our_power_watts": "gauge"})


def test_names_are_shown_whole_on_a_narrow_terminal(tmp_path: Path, capture: Capture) -> None:
    (tmp_path / "page.txt").write_bytes(capture("vllm_0.32.0"))
    shown = CliRunner().invoke(
        app, ["exporter", "catalogue", "check", "vllm", "--against", str(tmp_path / "page.txt")], env={"COLUMNS": "40"}
    )
    assert shown.exit_code == 0
    (line,) = [line for line in shown.output.splitlines() if line.startswith("prefix_hit_tokens")]
    assert line.split() == [
        "prefix_hit_tokens",
        "counter",
        "tokens",
        "5",
        "59616",
        "vllm:prompt_tokens_cached_by_source_total",
    ]


@pytest.mark.parametrize(
    ("page", "said"), [(b"", "it is empty"), (b"[]", r"it begins '\[\]'"), (b"<html>", "begins '<html>'")]
)
def test_a_page_that_is_none(tmp_path: Path, page: bytes, said: str) -> None:
    """vllm-project/aibrix#2004 (EM23): an engine may serve a JSON list where its metrics were expected."""
    (tmp_path / "page").write_bytes(page)
    with pytest.raises(ExporterError, match=f"--against .*page: not a metrics page: .*{said}"):
        run_check("vllm", tmp_path / "page", Console(), as_json=False)


def test_a_system_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(ExporterError, match=r"nope: no such file, and no system of this name; known: .*vllm"):
        run_check("nope", tmp_path, Console(), as_json=False)


@pytest.mark.parametrize("page", [None, gzip.compress(PAGE)[:-20], b"\x1f\x8bnonsense"])
def test_a_page_that_cant_be_read(tmp_path: Path, page: bytes | None) -> None:
    if page is not None:
        (tmp_path / "page.gz").write_bytes(page)
    with pytest.raises(ExporterError, match=r"--against .*page\.gz: can't be read"):
        run_check("vllm", tmp_path / "page.gz", Console(), as_json=False)


def test_the_exporter_still_is_a_command_of_its_own() -> None:
    shown = CliRunner().invoke(app, ["exporter", "--help"])
    assert shown.exit_code == 0
    assert "--target" in shown.output
    assert "catalogue" in shown.output


def test_the_schema_is_of_what_is_read() -> None:
    schema = json.loads(CliRunner().invoke(app, ["exporter", "catalogue", "schema"]).stdout)
    assert schema["required"] == ["system", "title", "role", "detect", "signals"]
    assert "from" in schema["$defs"]["LabelRule"]["properties"]


def test_the_documents_example_is_a_catalogue_file() -> None:
    text = (Path(__file__).parents[2] / "docs/catalogue.md").read_text()
    system = parse_system(text.split("```yaml\n")[1].split("```")[0], "docs/catalogue.md")
    page = b'acme_running{model_name="m"} 2\nacme_latency_bucket_total{bucket="5-10ms"} 4\n'
    found = check(system, page, shipped_catalogue())
    assert {one.signal: one.value for one in found.mapped} == {"running_requests": 2.0, "e2e_seconds": 4.0}
