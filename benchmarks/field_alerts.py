"""Which alerts a fault of a fleet in the field fires, and which of them Alertmanager sends: 200 workers, 6 routers,
3 models.

The faults and the series of `benchmarks.field_faults`, each fault for 45 minutes after 20 quiet ones. promtool
evaluates the shipped rules minute by minute; what fires is handed every five minutes to a real Alertmanager with the
shipped configuration, which says what it would send and what it keeps silent.

    python -m benchmarks.field_alerts                        # all faults; writes field_alerts.md
    python -m benchmarks.field_alerts --workers 24 leak      # a small fleet, one fault

Needs promtool and Alertmanager (scripts/install-test-tools).
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import yaml

from benchmarks.field_faults import FAULTS, command
from benchmarks.field_series import Field, Values
from prefixwatch.alerts.build import RULES
from prefixwatch.alerts.catalogue.model import load_catalogue
from prefixwatch.engines.process import ManagedProcess, free_ports
from prefixwatch.stack.local.monitoring import alertmanager_command, alertmanager_config, binary

QUIET_MINUTES = 20
FAULT_MINUTES = 45
_LONGER = {"tenant-flood": (70, 20), "refusals": (20, 65), "failures": (20, 65)}
"""A flood is compared with the hour before; a burn rate of 14.4 is judged over an hour."""
STEP_MINUTES = 5

TOGETHER = 5
"""Faults in one run of promtool, a cluster each: many clusters cost little more than one, and its queries have a limit
of 10,000 samples."""

Labels = Mapping[str, str]
Moments = dict[int, list[Labels]]
"""Minute → the alerts that fire then."""

_TICKETS = {
    "none": "",
    "hot-prefix": "WorkerHotspot",
    "cache-too-small": "EvictionChurn",
    "engine-gone": "TargetDown",
    "rolling-restart": "",
    "event-gap": "IndexStale",
    "salt-dropped": "IsolationSuspected",
    "salts-too-fine": "PrefixHitRateLow",
    "router-blind": "RouterBlind",
    "tokenizer-mismatch": "TokenizerMismatch",
    "block-size": "TokenizerMismatch",
    "hash-seed": "RouterBlind",
    "stale-history": "TokenizerMismatch",
    "other-routers": "RouterBlind",
    "kv-split": "RouterBlind",
    "leak": "InFlightLeak",
    "janitor": "InFlightUndercount",
    "slow-worker": "WorkerSlow",
    "metric-renamed": "MetricFamilyMissing",
    "metrics-page-broken": "MetricsEndpointFailing",
    "tenant-flood": "TenantFlood",
    "affinity-lost": "StickySessionCollisions SessionMigrationsHigh",
    "refusals": "RequestsRefused",
    "failures": "RequestsFailing",
    "preemptions": "PreemptionsHigh",
    "caching-off": "DataQualityMisleading",
}
_PAGES = {"refusals": "SloBudgetBurnFast", "failures": "SloBudgetBurnFast"}
EXPECTED: Mapping[str, Mapping[str, str]] = {
    name: dict.fromkeys(tickets.split(), "ticket") | dict.fromkeys(_PAGES.get(name, "").split(), "page")
    for name, tickets in _TICKETS.items()
}
"""Fault → the alerts that must be sent and their severity, and no others. Two faults that router and engines see alike
have one alert; the diagnosis separates them. A rolling restart is a deploy, and hurts nobody."""

_ALERT = re.compile(r'\{__name__="ALERTS"((?:[^{}"]|"(?:[^"\\]|\\.)*")*)\}')
_LABEL = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*")')
_KNOWN = ("IsolationViolation", "IsolationSuspected")
"""A pair of which the first silences the second."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The outcome of one fault's alerts."""

    sent: Mapping[tuple[str, str], int]
    """(alert, severity) → the series of it that would be sent, at most at one time."""
    silenced: frozenset[str]
    """Alerts that fired and were only ever silenced by a cause."""
    first_minutes: int | None
    """Minutes from the fault to the first that is sent, to five minutes; None without any."""

    @property
    def severities(self) -> dict[str, str]:
        return dict(self.sent.keys())


def field_of(name: str, workers: int) -> Field:
    field = Field(workers, sum(map(ord, name)), *_LONGER.get(name, (QUIET_MINUTES, FAULT_MINUTES)))
    FAULTS[name].change(field)
    return field


def fired(fields: Mapping[str, Field], folder: Path, promtool: str = "promtool") -> dict[str, Moments]:
    """The alerts that fire at every fifth minute, with their labels. Each field is a cluster beside the others."""
    minutes = range(STEP_MINUTES, max(field.minutes for field in fields.values()), STEP_MINUTES)
    nothing = [{"labels": '{no="alert"}', "value": 1}]
    firing = 'ALERTS{alertstate="firing", alertname!="Watchdog"}'
    document = {
        "rule_files": [str(path) for path in sorted(RULES.glob("*.yaml"))],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": _in_cluster(series, name), "values": _values(samples)}
                    for name, field in fields.items()
                    for series, samples in field.series().items()
                ],
                # Nothing has this label, so that promtool prints what there is instead.
                "promql_expr_test": [
                    {"expr": firing, "eval_time": f"{minute}m", "exp_samples": nothing} for minute in minutes
                ],
            }
        ],
    }
    file = folder / "field.yaml"
    file.write_text(json.dumps(document), encoding="utf-8")
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    parts = (done.stdout + done.stderr).split("time: ")[1:]
    if len(parts) != len(minutes):
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    found: dict[str, Moments] = {name: {minute: [] for minute in minutes} for name in fields}
    for minute, part in zip(minutes, parts, strict=True):
        for match in _ALERT.finditer(part):
            labels = _labels(match[1])
            found[labels["cluster"]][minute].append(labels)
    return found


def _in_cluster(series: str, cluster: str) -> str:
    name, _, labels = series.partition("{")
    return f'{name}{{cluster="{cluster}",{labels or "}"}'


def _values(samples: Values) -> str:
    """promtool's notation; runs of one value are written once."""
    parts: list[str] = []
    starts = np.flatnonzero(np.append(True, samples[1:] != samples[:-1]))
    for begin, end in zip(starts, np.append(starts[1:], len(samples)), strict=True):
        value = "_" if np.isnan(samples[begin]) else f"{samples[begin]:.10g}"
        parts.append(value if end - begin == 1 else f"{value}x{end - begin - 1}")
    return " ".join(parts)


def _labels(text: str) -> Labels:
    found = {name: json.loads(value) for name, value in _LABEL.findall(text)}
    del found["alertstate"]
    return found


async def inhibited(address: str, given: Sequence[Labels]) -> list[bool]:
    """Of alerts that all fire, whether the Alertmanager keeps each one silent.

    Alertmanager takes alerts in their order, and knows what inhibits a little later: a last pair that is known to
    inhibit shows that it knows all before it.
    """
    catalogue = load_catalogue()
    own = f"last at {time.monotonic()}"
    last = [
        {"alertname": name, "severity": catalogue.alert(name).severity, "fleet": own, "group": "isolation"}
        for name in _KNOWN
    ]
    async with aiohttp.ClientSession() as session:
        body = [{"labels": one} for one in [*given, *last]]
        async with session.post(f"{address}/api/v2/alerts", json=body) as response:
            response.raise_for_status()
        while True:
            async with session.get(f"{address}/api/v2/alerts") as response:
                states = {_key(one["labels"]): bool(one["status"]["inhibitedBy"]) for one in await response.json()}
            if states.get(_key(last[1])):
                return [states[_key(one)] for one in given]
            await asyncio.sleep(0.05)


def _key(labels: Labels) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


async def sent(name: str, field: Field, found: Moments, address: str) -> Sent:
    """What the Alertmanager would send of it. Each moment is a fleet of its own there."""
    found = {minute: every for minute, every in found.items() if minute < field.minutes}
    given = [{**one, "fleet": f"{name} {minute}"} for minute, every in found.items() for one in every]
    moments = [minute for minute, every in found.items() for _ in every]
    silent = await inhibited(address, given)
    counts: Counter[tuple[int, str, str]] = Counter()
    for minute, one, off in zip(moments, given, silent, strict=True):
        if not off:
            counts[minute, one["alertname"], one["severity"]] += 1
    most: dict[tuple[str, str], int] = {}
    for (_, alert, severity), count in counts.items():
        most[alert, severity] = max(most.get((alert, severity), 0), count)
    first = min((minute for minute, *_ in counts), default=None)
    only_silent = {one["alertname"] for one in given} - {alert for alert, _ in most}
    return Sent(most, frozenset(only_silent), None if first is None else first - field.quiet_minutes)


def passed(name: str, outcome: Sent) -> bool:
    return outcome.severities == EXPECTED[name]


def _batched(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for begin in range(0, len(names), size):
        yield names[begin : begin + size]


class Alertmanager:
    """A real Alertmanager with the shipped routes and inhibitions, whose receivers have nobody behind them."""

    def __init__(self, folder: Path) -> None:
        [port] = free_ports(1)
        self.address = f"http://127.0.0.1:{port}"
        config: Any = alertmanager_config(lambda name: {"name": name})
        (folder / "alertmanager.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        command = alertmanager_command(binary("alertmanager") or "alertmanager", folder, f"127.0.0.1:{port}")
        self._process = ManagedProcess("alertmanager", command, folder / "alertmanager.log")

    async def __aenter__(self) -> str:
        await self._process.wait_ready(f"{self.address}/-/ready", 120.0)
        return self.address

    async def __aexit__(self, *_: object) -> None:
        self._process.kill()


_HEAD = """\
# Alerts of a fleet in the field

Written by `python -m benchmarks.field_alerts`: {workers} workers of 3 models, 6 routers that share them, 50 unequal
tenants that burst. Each fault begins after {quiet} quiet minutes and lasts {fault}; a flood begins after 70, and
requests fail for 65. promtool evaluates the shipped rules every minute; what fires is handed to a real Alertmanager
with the shipped configuration every {step} minutes. *Pages* and *tickets* are what it sends, with the largest number of
series at one time; *silenced* fired too, and a cause that is sent explains it. *First* is the time from the fault to
the first that is sent, to {step} minutes.

| | fault | cause | pages | tickets | silenced | first |
|---|---|---|---|---|---|---|
"""


def _row(name: str, outcome: Sent) -> str:
    def listed(severity: str) -> str:
        each = sorted((alert, count) for (alert, own), count in outcome.sent.items() if own == severity)
        return ", ".join(alert if count == 1 else f"{alert} ({count})" for alert, count in each)

    cells = (
        "✓" if passed(name, outcome) else "✗",
        f"{name}: {FAULTS[name].title}",
        FAULTS[name].cause or "nothing",
        listed("page"),
        listed("ticket"),
        ", ".join(sorted(outcome.silenced)),
        "" if outcome.first_minutes is None else f"{outcome.first_minutes} min",
    )
    return "| " + " | ".join(cells) + " |"


async def _all(names: Sequence[str], workers: int) -> tuple[str, bool]:
    rows, good = [], []
    with tempfile.TemporaryDirectory(prefix="pw-") as made:
        folder = Path(made)
        async with Alertmanager(folder) as address:
            for some in _batched(names, TOGETHER):
                fields = {name: field_of(name, workers) for name in some}
                for name, found in (await asyncio.to_thread(fired, fields, folder)).items():
                    outcome = await sent(name, fields[name], found, address)
                    good.append(passed(name, outcome))
                    rows.append(_row(name, outcome))
                    print(rows[-1], flush=True)
    head = _HEAD.format(workers=workers, quiet=QUIET_MINUTES, fault=FAULT_MINUTES, step=STEP_MINUTES)
    closing = f"{sum(good)} of {len(good)} as they should be."
    return head + "\n".join([*rows, "", closing, ""]), all(good)


if __name__ == "__main__":
    sys.exit(command("field_alerts", _all))
