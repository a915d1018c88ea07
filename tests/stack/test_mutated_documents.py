"""Every kind of document with one value replaced: it loads, or an InputError says what is wrong."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefixwatch.alerts.catalogue.model import load_catalogue as load_thresholds
from prefixwatch.documents.errors import InputError
from prefixwatch.exporters.catalogue.model import load_catalogue as load_systems
from prefixwatch.exporters.http.web_config import WebSecurity
from prefixwatch.loadgen.scenario.model import SHIPPED_FOLDER, load_scenario
from prefixwatch.slo.build import load_request_objectives, load_slos
from prefixwatch.slo.read import SHIPPED as SHIPPED_SLOS
from prefixwatch.stack.config import load_config

REPLACEMENTS: list[Any] = [
    None, "", "x", "0", -1, 0, 1, 10**12, 10**299, 1e308, -1e-300, float("nan"), float("inf"), True, [], {}, [[]],
    [None], {"x": 1}, {1: 2}, {None: None}, ["a", "a"], "http://[", "http://u:p@h:99999", "tcp://", ":", "::", "5m",
    "${A}", "*", "[", "(", "\\", "a\nb", "\u202e", "2026-01-01", "0.5-0.1", "../..", "/dev/null", "x" * 2000, "٣",
]  # fmt: skip

SAMPLES = int(os.environ.get("MUTATED_DOCUMENTS", "40"))

CONFIG = """
fleet: {engine: simulated, workers: 2, profile: null, targets: [{name: w0, url: 'http://h:1', kv_events: 'tcp://h:5557'}]}
tenants: [{name: acme, salt: s3cret}, {name: bolt}]
tokenizer: {block_size: 16}
router:
  port: 8000
  host: 127.0.0.1
  policy: {name: cache_aware, options: {}}
  cache_view: {source: history}
  timeouts: {connect_seconds: 1}
  health: {}
  isolation: {caches_at_start: unknown}
  otlp_endpoint: http://h:4318
exporter:
  listen: 127.0.0.1:0
  interval_seconds: 5
  targets: [{name: e, url: 'http://h:2', zone: a, node: b}]
  scrape_configs:
    - job_name: sd
      static_configs: [{targets: ['h:3'], labels: {zone: b}}]
      relabel_configs: [{source_labels: [zone], target_label: name, regex: '(.*)', replacement: '$1', action: replace}]
      authorization: {credentials: token}
  limits: {targets: 9}
  requests: {classes: [chat]}
  prefixes: [{name: p, fingerprint: 0123456789abcdef}]
slo: {objectives: [ttft]}
pricing: {gpu_usd_per_hour: 2.5, gpus_per_worker: 4}
security: {hash_secret: 0123456789abcdef}
"""


def config(path: Path) -> None:
    loaded = load_config(path, {})
    loaded.exporter_config(loaded.fleet.targets)
    loaded.router_config(loaded.fleet.targets, None, 16)


def slo(path: Path) -> None:
    load_slos([path])
    load_request_objectives([path])


def systems(path: Path) -> None:
    load_systems(path.parent)


DOCUMENTS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "config": (CONFIG, config),
    "web config": ("basic_auth_users: {a: $2y$10$abcdefghijklmnopqrstuuJ}\n", WebSecurity),
    "thresholds": ("PrefixHitRateLow: {threshold: 0.3, for: 10m, minimum: 5, why: measured}\n", load_thresholds),
    **{f"scenario {p.stem}": (p.read_text(), load_scenario) for p in sorted(SHIPPED_FOLDER.glob("*.yaml"))[::5]},
    **{f"SLO {p.stem}": (p.read_text(), slo) for p in sorted(SHIPPED_SLOS.glob("*.yaml"))[::3]},
    "catalogue": ((Path(load_systems.__code__.co_filename).parent / "vllm.yaml").read_text(), systems),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_wrong_value_anywhere_is_an_input_error(name: str, tmp_path: Path) -> None:
    text, load = DOCUMENTS[name]
    whole = next(yaml.safe_load_all(text))
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(whole))
    load(path)
    options = [(place, new) for place in places(whole) for new in REPLACEMENTS]
    for place, new in random.Random(name).sample(options, min(len(options), SAMPLES)):
        path.write_text(yaml.safe_dump(replaced(whole, place, new)))
        try:
            load(path)
        except InputError:
            continue
        except Exception as error:
            raise AssertionError(f"{name}: {'.'.join(map(str, place))} = {new!r}") from error
