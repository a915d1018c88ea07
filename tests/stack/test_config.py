"""The configuration file and the environment that overrides it."""

from __future__ import annotations

from pathlib import Path

import pytest

from documents import DocumentError
from router.config import WorkerConfig
from stack.config import PrefixwatchConfig, load_config


def test_without_a_file_everything_has_a_default() -> None:
    assert load_config(None, {}) == PrefixwatchConfig()


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "prefixwatch.yaml"
    file.write_text("router: {port: 8100, policy: {name: score}}\nfleet: {workers: 2}\n")
    config = load_config(file, {"PREFIXWATCH_ROUTER__PORT": "8200", "PREFIXWATCH_ENGINES_DIR": "/elsewhere"})
    assert (config.router.port, config.router.policy.name, config.fleet.workers) == (8200, "score", 2)


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(
        DocumentError, match=r"environment variable PREFIXWATCH_FLEET__WORKERS: .* greater than or equal"
    ):
        load_config(None, {"PREFIXWATCH_FLEET__WORKERS": "0"})


def test_a_wrong_key_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "prefixwatch.yaml"
    file.write_text("router:\n  prot: 8100\n")
    with pytest.raises(DocumentError, match=r"prefixwatch\.yaml:2: router\.prot: unknown key: did you mean 'port'"):
        load_config(file, {})


def test_tenants_salts_reach_the_router_and_no_message(tmp_path: Path) -> None:
    file = tmp_path / "prefixwatch.yaml"
    file.write_text("tenants:\n  - {name: acme, salt: s3cret}\n")
    config = load_config(file, {})
    assert "s3cret" not in repr(config)
    router = config.router_config([WorkerConfig(name="w0", url="http://127.0.0.1:1")], None, 16)
    assert router.tenants.salts == {"acme": "s3cret"}


def test_the_exporter_scrapes_the_fleet_and_its_own_targets(tmp_path: Path) -> None:
    file = tmp_path / "prefixwatch.yaml"
    file.write_text(
        "fleet: {targets: [{name: w0, url: 'http://h:8001', kv_events: 'tcp://h:5557', kv_replay: 'tcp://h:5558'}]}\n"
        "exporter: {interval_seconds: 2, targets: [{name: edge, url: 'http://h:8000'}]}\n"
    )
    config = load_config(file, {})
    exporter = config.exporter_config(config.fleet.targets)
    assert exporter.targets[0].kv_replay == "tcp://h:5558"
    assert [(target.name, target.url, target.kv_events) for target in exporter.targets] == [
        ("w0", "http://h:8001/metrics", "tcp://h:5557"),
        ("edge", "http://h:8000/metrics", None),
    ]
    assert exporter.interval_seconds == 2


def test_an_exporter_without_targets_is_told() -> None:
    with pytest.raises(DocumentError, match="list nothing to scrape"):
        PrefixwatchConfig().exporter_config([])


def test_what_requests_are_judged_priced_and_named_by_reaches_the_exporter(tmp_path: Path) -> None:
    file = tmp_path / "prefixwatch.yaml"
    file.write_text(
        "fleet: {targets: [{name: w0, url: 'http://h:8001', zone: eu-1, node: n7}]}\n"
        "tenants: [{name: acme}]\n"
        "slo: {objectives: [availability]}\n"
        "pricing: {gpu_usd_per_hour: 2.5, gpus_per_worker: 4}\n"
        "exporter: {requests: {classes: [chat]}}\n"
    )
    config = load_config(file, {})
    exporter = config.exporter_config(config.fleet.targets)
    assert (exporter.objectives, exporter.tenants) == (("availability",), ("acme",))
    assert (exporter.pricing.gpu_usd_per_hour, exporter.pricing.gpus_per_worker) == (2.5, 4)
    assert exporter.requests.classes == ("chat",)
    assert (exporter.targets[0].zone, exporter.targets[0].node) == ("eu-1", "n7")


def test_what_the_router_records_and_remembers_is_configured(tmp_path: Path) -> None:
    file = tmp_path / "prefixwatch.yaml"
    file.write_text(
        "tenants: [{name: acme}, {name: bolt, salt: s3cret}]\n"
        "router: {class_header: x-class, records_kept: 99, isolation: {caches_at_start: unknown}}\n"
        "security: {hash_secret: 0123456789abcdef}\n"
    )
    config = load_config(file, {})
    assert "0123456789abcdef" not in repr(config)
    router = config.router_config([WorkerConfig(name="w0", url="http://127.0.0.1:1")], None, 16)
    assert router.tenants.known == {"acme", "bolt"}
    assert (router.tenants.class_header, router.request_records.kept) == ("x-class", 99)
    assert (router.request_records.hash_secret, router.isolation.caches_at_start) == ("0123456789abcdef", "unknown")


def test_an_environment_variable_for_a_key_that_isnt_there() -> None:
    with pytest.raises(DocumentError, match=r"^environment variable PREFIXWATCH_EXPORTER__NOPE: unknown key$"):
        load_config(None, {"PREFIXWATCH_EXPORTER__NOPE": "1"})
