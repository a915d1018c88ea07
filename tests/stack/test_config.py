"""The configuration file and the environment that overrides it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prefixwatch.documents import DocumentError
from prefixwatch.router.config import RouterConfig, WorkerConfig
from prefixwatch.stack.config import PrefixwatchConfig, load_config
from prefixwatch.stack.local.fleet import write_with_secrets


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


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "PREFIXWATCH_FLEET__TARGETS__0",
            "x",
            "fleet.targets is a list: give the whole list as YAML, in PREFIXWATCH_FLEET__TARGETS",
        ),
        ("PREFIXWATCH_ROUTER__PORT__X", "1", "router.port is a single value, in PREFIXWATCH_ROUTER__PORT"),
        ("PREFIXWATCH_ROUTER__PORT", "8x", "router.port: should be a valid integer"),
        ("PREFIXWATCH_ROUTER__PORT", "2026-99-99", "not valid YAML: '2026-99-99' is not a valid date"),
        ("PREFIXWATCH_ROUTER__PORT", "[1, 2]", "router.port: should be a valid integer"),
        ("PREFIXWATCH_ROUTER__PORT", "a: b: c", "not valid YAML: mapping values are not allowed here"),
        ("PREFIXWATCH_ROUTER__PROT", "1", "router.prot: unknown key: did you mean 'port'?"),
        ("PREFIXWATCH_ROUTR__PORT", "1", "routr: unknown key: did you mean 'router'?"),
        ("PREFIXWATCH_FLEET__", "1", "fleet.: unknown key: use one of engine"),
        ("PREFIXWATCH_SECURITY__HASH_SECRET", "hunter2", "security.hash_secret: "),
    ],
)
def test_a_variable_that_sets_nothing_is_named_with_the_remedy(
    tmp_path: Path, variable: str, value: str, message: str
) -> None:
    file = tmp_path / "prefixwatch.yaml"
    file.write_text("router: {port: 8100}\nfleet: {targets: [{name: w0, url: 'http://h:1'}]}\n")
    with pytest.raises(DocumentError) as caught:
        load_config(file, {variable: value})
    text = str(caught.value)
    assert re.match(rf"environment variable {variable}(:1)?: ", text)
    assert message in text
    assert "hunter2" not in text


def test_a_whole_section_can_come_from_the_environment() -> None:
    given = {
        "PREFIXWATCH_FLEET__TARGETS": "[{name: a, url: 'http://h:1'}]",
        "PREFIXWATCH_ROUTER__POLICY__NAME": "score",
    }
    config = load_config(None, given)
    assert [target.name for target in config.fleet.targets] == ["a"]
    assert config.router.policy.name == "score"


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


def test_the_routers_admin_token_reaches_the_router_and_whatever_scrapes_it(tmp_path: Path) -> None:
    file = tmp_path / "prefixwatch.yaml"
    file.write_text(f"router: {{admin_token: {'t' * 20}}}\nfleet: {{targets: [{{name: w0, url: 'http://h:1'}}]}}\n")
    config = load_config(file, {})
    authorization = config.exporter_config(config.fleet.targets, "http://h:8000").targets[0].authorization
    assert authorization is not None
    assert authorization.credentials is not None
    assert authorization.credentials.get_secret_value() == "t" * 20

    write_with_secrets(tmp_path / "router.json", config.router_config(config.fleet.targets, None, 16).model_dump())
    written = RouterConfig.model_validate_json((tmp_path / "router.json").read_text())
    assert written.admin_token is not None
    assert written.admin_token.get_secret_value() == "t" * 20
    assert (tmp_path / "router.json").stat().st_mode & 0o777 == 0o600


def test_the_exporter_scrapes_the_fleet_and_its_own_targets(tmp_path: Path) -> None:
    file = tmp_path / "prefixwatch.yaml"
    file.write_text(
        "fleet: {targets: [{name: w0, url: 'http://h:8001', kv_events: 'tcp://h:5557', kv_replay: 'tcp://h:5558'}]}\n"
        "exporter: {interval_seconds: 2, targets: [{name: edge, url: 'http://h:8000'}]}\n"
    )
    config = load_config(file, {})
    exporter = config.exporter_config(config.fleet.targets)
    assert exporter.targets[0].kv_replay == ("tcp://h:5558",)
    assert [(target.name, target.url, target.kv_events) for target in exporter.targets] == [
        ("w0", "http://h:8001/metrics", ("tcp://h:5557",)),
        ("edge", "http://h:8000/metrics", ()),
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
