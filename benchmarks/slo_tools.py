"""The shipped objective `ttft` as prefixwatch's rules, as Sloth's, and as any other tool's, on the same series.

    curl -o sloth.yml https://raw.githubusercontent.com/slok/sloth/0e395d8/examples/_gen/getting-started.yml
    python -m benchmarks.slo_tools --sloth sloth.yml
    python -m benchmarks.slo_tools --rules pyrra=pyrra-ttft.yaml     # rules that another tool made for the objective

Sloth's file is its published example: here its query, target and name are replaced by those of `ttft`. A tool's first
alert of each severity is looked for minute by minute, in three histories of the objective's requests.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prefixwatch.alerts.build import build, rendered
from prefixwatch.slo.build import load_slos

SOURCE = "https://raw.githubusercontent.com/slok/sloth/0e395d8/examples/_gen/getting-started.yml"
_BAD, _ALL = (
    'http_request_duration_seconds_count{job="myservice",code=~"(5..|429)"}',
    'http_request_duration_seconds_count{job="myservice"}',
)
"""What Sloth's example divides."""
_BUDGET = "0.0009999999999999432"
"""Its target of 99.9 %, as it is written there."""
_JUDGED = "prefixwatch_slo_requests_total"
"""The exporter's count of the objective's good and bad requests, which all rules read."""
_ALERT = re.compile(r'\{__name__="ALERTS"((?:[^{}"]|"(?:[^"\\]|\\.)*")*)\}')
_LABEL = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*")')
_OTHERS = ("Watchdog", "SloMetricAbsent", "SloTooFewEventsToJudge")
"""Alerts of prefixwatch that aren't about the objective being missed."""

Counts = Sequence[float]
"""A counter's value at each minute."""


@dataclass(frozen=True, slots=True)
class History:
    """Counters of all requests and of the good ones, minute by minute; alerts are looked for after minute `since`."""

    title: str
    requests: Counts
    good: Counts
    since: int


def _added(*parts: tuple[int, float]) -> list[float]:
    """A counter from (minutes, growth a minute)."""
    found = [0.0]
    for minutes, growth in parts:
        for _ in range(minutes):
            found.append(found[-1] + growth)
    return found


def histories() -> list[History]:
    sparse = [float(sum(minute >= at for at in (20, 50, 80, 110))) for minute in range(121)]
    return [
        History("4 requests in 2 hours, one of them bad", sparse, [value - (value >= 2) for value in sparse], 0),
        History(
            "fresh installation, 60 % bad in its first 7 minutes",
            _added((7, 60.0), (53, 60.0)), _added((7, 24.0), (53, 60.0)), 0,
        ),
        History("total outage after 6 good hours", _added((420, 60.0)), _added((360, 60.0), (60, 0.0)), 360),
    ]  # fmt: skip


def sloth_rules(text: str, target: float) -> str:
    """Sloth's example with the query and the target of our objective. Raises ValueError for another file."""
    if _BAD not in text or _BUDGET not in text:
        raise ValueError(f"this isn't Sloth's examples/_gen/getting-started.yml: curl -o sloth.yml {SOURCE}")
    text = text.replace(_BAD, f'{_JUDGED}{{slo="ttft",verdict="bad"}}').replace(_ALL, f'{_JUDGED}{{slo="ttft"}}')
    return text.replace(_BUDGET, f"{1 - target:g}").replace("vector(0.9990000000000001)", f"vector({target:g})")


def first_alerts(rules: Path, history: History, promtool: str, folder: Path) -> dict[str, int]:
    """Minutes until the first alert of each severity fires."""
    minutes = range(1, len(history.requests))
    bad = [total - good for total, good in zip(history.requests, history.good, strict=True)]
    series = {
        f'{_JUDGED}{{slo="ttft",verdict="{verdict}"}}': values
        for verdict, values in (("good", history.good), ("bad", bad))
    }
    test = {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": " ".join(f"{value:g}" for value in values)} for name, values in series.items()
        ],
        "promql_expr_test": [
            # Nothing has this label, so that promtool prints what there is instead.
            {"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{minute}m",
             "exp_samples": [{"labels": '{no="alert"}', "value": 1}]}
            for minute in minutes
        ],
    }  # fmt: skip
    groups = [group["name"] for group in yaml.safe_load(rules.read_text(encoding="utf-8"))["groups"]]
    document = {"rule_files": [str(rules)], "evaluation_interval": "1m", "group_eval_order": groups, "tests": [test]}
    file = folder / "test.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    parts = (done.stdout + done.stderr).split("time: ")[1:]
    if len(parts) != len(minutes):
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    found: dict[str, int] = {}
    for minute, part in zip(minutes, parts, strict=True):
        for match in _ALERT.finditer(part):
            labels = {name: json.loads(value) for name, value in _LABEL.findall(match[1])}
            if labels["alertname"] not in _OTHERS and minute > history.since:
                found.setdefault(_severity(labels), minute - history.since)
    return found


def _severity(labels: Mapping[str, str]) -> str:
    return labels.get("sloth_severity") or labels.get("severity", "alert")


def compared(files: Mapping[str, Path], promtool: str, folder: Path) -> list[list[str]]:
    """A table's rows: the first names the tools, then the rules of each, then each history."""
    counts = {name: _counted(path) for name, path in files.items()}
    rules = [f"{records} recording, {alerts} alerting" for records, alerts in counts.values()]
    rows = [["", *files], ["rules", *rules]]
    for history in histories():
        cells = []
        for path in files.values():
            found = first_alerts(path, history, promtool, folder)
            in_turn = sorted(found.items(), key=lambda one: one[1])
            cells.append(", ".join(f"{severity} after {minute} min" for severity, minute in in_turn) or "nothing")
        rows.append([history.title, *cells])
    return rows


def _counted(rules: Path) -> tuple[int, int]:
    all_rules: list[dict[str, Any]] = [
        rule for group in yaml.safe_load(rules.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]
    ]
    return sum("record" in rule for rule in all_rules), sum("alert" in rule for rule in all_rules)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slo_tools", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sloth", type=Path, help=f"Sloth's published example: curl -o sloth.yml {SOURCE}")
    parser.add_argument("--rules", action="append", default=[], metavar="NAME=FILE", help="rules of another tool")
    parser.add_argument("--promtool", default="promtool")
    options = parser.parse_args(given)
    others = dict(each.split("=", 1) for each in options.rules if "=" in each)
    if options.sloth is None and not others:
        print(f"give Sloth's rules with --sloth FILE. They aren't part of this project: curl -o sloth.yml {SOURCE}")
        return 2
    [objective] = load_slos(["ttft"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = {"prefixwatch": rendered(build(["ttft"]))["slo-ttft.yaml"]}
        try:
            if options.sloth is not None:
                texts["sloth"] = sloth_rules(options.sloth.read_text(encoding="utf-8"), objective.target)
            texts |= {tool: Path(path).read_text(encoding="utf-8") for tool, path in others.items()}
        except (OSError, ValueError) as error:
            print(f"benchmarks.slo_tools: {error}")
            return 2
        files = {}
        for tool, text in texts.items():
            files[tool] = folder / f"{tool}.yaml"
            files[tool].write_text(text, encoding="utf-8")
        for number, row in enumerate(compared(files, options.promtool, folder)):
            print("| " + " | ".join(row) + " |")
            if number == 0:
                print("|" + "---|" * len(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
