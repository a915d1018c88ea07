"""`bench --target --prometheus`: the workers behind a target, as a real Prometheus has them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefixwatch.engines.process import ManagedProcess, free_port, stop_all
from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.loadgen.request_log.fleet_rows import read_fleet
from prefixwatch.stack.bench.schedule import Run
from prefixwatch.stack.bench.watching.prometheus_log import engine_rows, exporter_rows
from tests.stack.command_line import prefixwatch
from tests.stack.staging import Staging, others_chatting, running_staging

RUN = Run(1, "target", 0)


@dataclass
class Watched:
    staging: Staging
    prometheus: str


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A Prometheus that scrapes both the exporter and the engines once a second."""
    folder, port = tmp_path_factory.mktemp("watched"), free_port()
    with running_staging(folder) as staging:
        jobs = {"exporter": [staging.exporter], "engines": list(staging.engines)}
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [url.removeprefix("http://") for url in urls]}]}
                for job, urls in jobs.items()
            ],
        }
        file = folder / "prometheus.yaml"
        file.write_text(yaml.safe_dump(config))
        options = [f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
        command = [str(shutil.which("prometheus")), *options, f"--web.listen-address=127.0.0.1:{port}"]
        process = ManagedProcess("prometheus", command, folder / "prometheus.log")
        try:
            asyncio.run(process.wait_ready(f"http://127.0.0.1:{port}/-/ready", 60))
            yield Watched(staging, f"http://127.0.0.1:{port}")
        finally:
            stop_all([process])


def bench(watched: Watched, out: Path, match: str) -> Any:
    source = ("--prometheus", watched.prometheus, "--prometheus-match", match)
    target = ("--target", watched.staging.router, "--model-dir", str(default_model_dir()))
    result = prefixwatch("bench", "smoke", *target, *source, "--repeats", "1", "--out", str(out))
    assert result.code in (0, 1, 3), result.err
    return json.loads((out / "summary.json").read_text())


@pytest.mark.prometheus
@pytest.mark.parametrize("job", ["exporter", "engines"])
def test_each_worker_has_a_row_a_scrape_and_its_counters_agree_with_the_answers(
    watched: Watched, job: str, tmp_path: Path
) -> None:
    summary = bench(watched, tmp_path / "out", f'job="{job}"')
    rows = read_fleet(tmp_path / "out" / "fleet.parquet")
    addresses = {url.removeprefix("http://") for url in watched.staging.engines}
    assert {row.worker for row in rows} == ({"simulated-0", "simulated-1"} if job == "exporter" else addresses)
    assert all(row.kv_usage_ratio is not None and row.running is not None for row in rows)
    times = sorted(row.at_s for row in rows if row.worker == rows[0].worker and row.at_s is not None)
    assert times[0] < 0
    assert times[-1] > 4
    assert len(times) >= 5  # of the 5 s, even where the machine makes a scrape wait
    [run] = summary["runs"]
    assert run["engine"]["query_tokens"] > 0
    told = " ".join([*summary["notes"], *summary["validity"]["reasons"]])
    assert "the engines counted" not in told
    assert "others used these engines" not in told
    assert 'id="engine-load"' in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.prometheus
def test_other_peoples_traffic_makes_the_run_invalid(watched: Watched, tmp_path: Path) -> None:
    with others_chatting(watched.staging.router):
        summary = bench(watched, tmp_path / "out", 'job="engines"')
    reasons = summary["validity"]["reasons"]
    assert any("others used these engines during the run: the engines looked up" in reason for reason in reasons)


@pytest.mark.prometheus
def test_matchers_that_are_none_are_refused(watched: Watched, tmp_path: Path) -> None:
    source = ("--prometheus", watched.prometheus, "--prometheus-match", "job=engines")
    target = ("--target", watched.staging.router, "--model-dir", str(default_model_dir()))
    result = prefixwatch("bench", "smoke", *target, *source, "--repeats", "1", "--out", str(tmp_path))
    assert result.code == 2
    assert "write --prometheus-match as label matchers" in " ".join(result.err.split())


def test_one_source_of_the_workers_figures_is_enough(tmp_path: Path) -> None:
    both = ("--exporter", "http://127.0.0.1:9", "--prometheus", "http://127.0.0.1:9")
    result = prefixwatch("bench", "smoke", "--target", "http://127.0.0.1:9", *both, "--out", str(tmp_path))
    assert (result.code, "leave one out" in result.err) == (2, True)


def sample(name: str, value: float, **labels: str) -> tuple[dict[str, str], float]:
    return {"__name__": name, **labels}, value


def test_a_reading_that_was_scraped_twice_is_one_row_at_its_own_time() -> None:
    page = [sample("prefixwatch_target_up", 1.0), sample("prefixwatch_requests_running", 3.0, engine="0")]
    page += [sample("prefixwatch_requests_running", 2.0, engine="1"), sample("prefixwatch_kv_usage_ratio", 0.5)]
    page += [sample("prefixwatch_kv_usage_ratio", 0.7)]
    ages = {10.0: 0.5, 11.0: 1.5, 12.0: 0.2}
    instants = {at: [*page, sample("prefixwatch_scrape_age_seconds", age)] for at, age in ages.items()}
    rows = list(exporter_rows("e0", instants, RUN))
    assert [(row.unix_s, row.running, row.kv_usage_ratio) for row in rows] == [(9.5, 5.0, 0.7), (11.8, 5.0, 0.7)]


def test_an_exporters_target_that_is_no_engine_has_no_rows() -> None:
    instants = {10.0: [sample("prefixwatch_target_up", 1.0, system="prefixwatch-router")]}
    assert list(exporter_rows("router", instants, RUN)) == []


def test_an_engine_that_gives_no_page_is_a_row_without_figures() -> None:
    page = [sample("up", 1.0)]
    page += [sample("vllm:num_requests_running", 4.0, engine="0", model_name='a "b"\\c')]
    page += [sample("vllm:prefix_cache_queries_total", 100.0, engine="0", model_name='a "b"\\c')]
    rows = list(engine_rows("10.0.0.1:8000", {10.0: page, 11.0: [sample("up", 0.0)]}, RUN))
    assert [(row.up, row.running, row.prefix_query_tokens_total) for row in rows] == [
        (True, 4.0, 100.0),
        (False, None, None),
    ]


def test_what_a_prometheus_scrapes_beside_engines_has_no_rows() -> None:
    assert list(engine_rows("10.0.0.9:9100", {10.0: [sample("up", 1.0)]}, RUN)) == []
