"""What silences what, in a real Alertmanager with the shipped configuration: causes their symptoms, nothing else."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from prefixwatch.alerts.alertmanager import EXPORTER_DOWN
from prefixwatch.alerts.catalogue.model import Alert, load_catalogue
from prefixwatch.engines.process import free_port
from prefixwatch.stack.local.monitoring import alertmanager_command, alertmanager_config, binary

pytestmark = pytest.mark.alertmanager

Labels = dict[str, str]


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address. It tells nobody."""
    folder = tmp_path_factory.mktemp("alertmanager")
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(alertmanager_config(lambda name: {"name": name})))
    address = f"127.0.0.1:{free_port()}"
    found = binary("alertmanager")
    assert found is not None
    command = alertmanager_command(found, folder, address)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _until(lambda: _get(f"http://{address}/-/ready") is not None)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=20)


def _get(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bytes(answer.read())
    except OSError:
        return None


def _until(done: Any) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def labels(alert: Alert, **more: str) -> Labels:
    own = {"alertname": alert.name, "severity": alert.severity, "cause": str(alert.cause).lower(), "group": alert.group}
    return own | more


def silenced(address: str, given: list[Labels]) -> list[bool]:
    """Of alerts that all fire, whether each is inhibited. A fresh `fleet` for every question keeps them apart.

    Alertmanager takes alerts in their order, and knows what inhibits a little later: a last pair that is known to
    inhibit shows that it knows all before it.
    """
    fleet = f"last after {given[0]['alertname']} of {given[0]['fleet']}"
    last = [labels(CATALOGUE.alert(name), fleet=fleet) for name in ("IsolationViolation", "IsolationSuspected")]
    body = json.dumps([{"labels": one} for one in [*given, *last]]).encode()
    request = urllib.request.Request(f"{address}/api/v2/alerts", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=10).close()
    states: dict[Any, bool] = {}

    def known() -> bool:
        text = _get(f"{address}/api/v2/alerts?active=true&inhibited=true")
        states.update({_key(one["labels"]): bool(one["status"]["inhibitedBy"]) for one in json.loads(text or b"[]")})
        return states.get(_key(last[1]), False)

    _until(known)
    return [states[_key(one)] for one in given]


def _key(given: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(given.items())


CATALOGUE = load_catalogue()
CAUSES = [(alert.name, symptom) for alert in CATALOGUE.alerts for symptom in alert.inhibits]


@pytest.mark.parametrize(("cause", "symptom"), CAUSES)
def test_a_cause_silences_its_symptom_here_and_nowhere_else(alertmanager: str, cause: str, symptom: str) -> None:
    source, target = CATALOGUE.alert(cause), CATALOGUE.alert(symptom)
    fleet = f"{cause} {symptom}"
    same_worker = source.per is not None and target.per is not None
    shared = {"target": "a"} if same_worker else {}
    scope = {"scope": "fleet"} if source.per is not None and not same_worker else {}
    given = [
        labels(source, fleet=fleet, **shared, **scope),
        labels(target, fleet=fleet, **shared),
        labels(target, fleet=f"not {fleet}", **shared),
        labels(target, fleet=fleet, cluster="another", **shared),
    ]

    assert silenced(alertmanager, given) == [False, True, False, False]
    if same_worker:
        other = [labels(source, fleet=f"{fleet} other", target="a"), labels(target, fleet=f"{fleet} other", target="b")]
        assert silenced(alertmanager, other) == [False, False]


def test_one_workers_cause_leaves_the_fleets_symptoms_alone(alertmanager: str) -> None:
    """With 200 workers some cause always fires: only one that a tenth of them have explains what the fleet shows."""
    churn, low = CATALOGUE.alert("EvictionChurn"), CATALOGUE.alert("PrefixHitRateLow")
    near = CATALOGUE.alert("PrefixBlocksNearCapacity")
    worker = {"target": "w17", "model": "m"}

    of_one = [labels(churn, fleet="one", **worker), labels(low, fleet="one", model="m")]
    beside = [labels(near, fleet="one", target=name, model="m") for name in ("w17", "w150")]
    assert silenced(alertmanager, [*of_one, *beside]) == [False, False, True, False]

    wide = [labels(churn, fleet="many", scope="fleet", model="m"), labels(churn, fleet="many", **worker)]
    symptoms = [labels(low, fleet="many", model=name) for name in ("m", "another")]
    assert silenced(alertmanager, [*wide, *symptoms]) == [False, True, True, False]


SAYS_MORE = {("ModelWithoutWorkers", "WorkersDown"), ("SloMostlyBad", "SloBudgetBurnFast"),
             ("IsolationViolation", "SloZeroToleranceBroken")}  # fmt: skip
"""Pages that silence a page, of the same incident, that says less."""


def test_a_page_on_users_is_silenced_by_a_page_that_says_more_only(alertmanager: str) -> None:
    """While users are hurt somebody must be woken, whatever the reason."""
    others = [alert for alert in CATALOGUE.alerts if alert.name != EXPORTER_DOWN]
    every = [labels(a, fleet="all", target="a", slo="ttft") for a in others if a.cause or a.severity == "page"]

    answers = silenced(alertmanager, every)

    silent = {one["alertname"] for one, off in zip(every, answers, strict=True) if off and one["severity"] == "page"}
    assert silent == {less for _, less in SAYS_MORE}
    assert any(answers)


def test_without_the_exporter_only_our_own_alerts_are_silent(alertmanager: str) -> None:
    given = [
        labels(CATALOGUE.alert(EXPORTER_DOWN), fleet="blind"),
        labels(CATALOGUE.alert("PrefixHitRateLow"), fleet="blind"),
        labels(CATALOGUE.alert("PrefixHitRateLow"), fleet="seeing"),
        {"alertname": "DiskFull", "severity": "page", "group": "storage", "fleet": "blind"},
    ]

    assert silenced(alertmanager, given) == [False, True, False, False]


def test_a_slow_worker_is_told_beside_the_hotspot_that_it_makes(alertmanager: str) -> None:
    """A slow worker's queue is a hotspot: were the cause silenced by its symptom, nobody would drain the worker."""
    given = [labels(CATALOGUE.alert(name), fleet="slow") for name in ("WorkerHotspot", "WorkerSlow")]

    assert silenced(alertmanager, given) == [False, False]
