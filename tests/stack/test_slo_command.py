"""`prefixwatch slo`: exit codes and what is printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from alerts.build import RULES
from alerts.errors import RuleError
from alerts.settings import RuleSettings
from documents import DocumentError
from loadgen.records import Outcome, RequestRecord, write_requests
from slo.library import SHIPPED
from stack.errors import INPUT_ERRORS, UsageError
from stack.slo_command import BuildOptions, check, grade, run_build

TTFT = (SHIPPED / "ttft.yaml").read_text(encoding="utf-8")


def built(options: BuildOptions) -> tuple[int, str]:
    console = Console(record=True, width=200)
    return run_build(options, console), console.export_text()


def request(index: int, ttft_s: float, **more: object) -> RequestRecord:
    record = RequestRecord(
        id=str(index), policy="score", repeat=0, index=index, phase="measured", tenant="a", session="", turn=0,
        group="", request_class="chat", scheduled_s=float(index), sent_s=float(index), first_token_s=index + ttft_s,
        end_s=index + ttft_s, outcome=Outcome.COMPLETED, planned_prompt_tokens=100, prompt_tokens=100,
    )  # fmt: skip
    for name, value in more.items():
        setattr(record, name, value)
    return record


def log(folder: Path, *records: RequestRecord) -> Path:
    path = folder / "requests.parquet"
    write_requests(path, records)
    return path


def test_check_tells_how_each_objective_is_understood() -> None:
    found = {row["slo"]: row for row in check([])}

    assert found["ttft"]["rule"] == "95 % of requests: TTFT ≤ 0.5 s"
    assert found["isolation"]["alerts"] == "any bad event"
    assert "216 % bad events can't happen" in found["session-hit-rate"]["notes"][0]
    json.dumps(list(found.values()))


def test_the_committed_rules_are_up_to_date() -> None:
    code, text = built(BuildOptions(out=RULES, check=True, alertmanager=RULES.parent / "alertmanager.yaml"))

    assert (code, "out of date" in text) == (0, False)


def test_a_check_says_what_a_build_would_change(tmp_path: Path) -> None:
    out = tmp_path / "rules"
    assert built(BuildOptions(["ttft"], out))[0] == 0
    (out / "slo-ttft.yaml").write_text("edited by hand")
    (out / "pipeline.yaml").unlink()
    (out / "old.yaml").write_text("")

    code, text = built(BuildOptions(["ttft"], out, check=True))

    assert code == 1
    assert f"{out / 'slo-ttft.yaml'}: differs" in text
    assert f"{out / 'pipeline.yaml'}: missing" in text
    assert f"{out / 'old.yaml'}: no longer made, delete it" in text


def test_other_formats(tmp_path: Path) -> None:
    assert built(BuildOptions(["ttft"], tmp_path / "k8s", format="kubernetes"))[0] == 0
    assert built(BuildOptions(["ttft"], tmp_path / "sloth", format="sloth"))[0] == 0

    assert yaml.safe_load((tmp_path / "k8s" / "slo-ttft.yaml").read_text())["kind"] == "PrometheusRule"
    assert yaml.safe_load((tmp_path / "sloth" / "llm-serving.yaml").read_text())["version"] == "prometheus/v1"
    with pytest.raises(UsageError, match="--format xml: use one of prometheus, sloth, kubernetes"):
        built(BuildOptions(["ttft"], tmp_path, format="xml"))


def test_what_is_wrong_with_a_document_or_an_option_is_the_users_input(tmp_path: Path) -> None:
    with pytest.raises(DocumentError):
        built(BuildOptions(["no-such-slo"], tmp_path))
    with pytest.raises(RuleError):
        RuleSettings(scrape_interval_seconds=600)
    assert {DocumentError, RuleError} < set(INPUT_ERRORS)


def test_a_request_log_is_graded_by_policy(tmp_path: Path) -> None:
    requests = log(tmp_path, *(request(k, 0.1) for k in range(19)), request(19, 3.0))

    found, code = grade(requests, ["ttft"])

    [row] = found["policies"]["score"]
    assert (row["name"], row["good"], row["total"], row["ok"], code) == ("ttft", 19, 20, True, 0)


def test_a_missed_objective_is_1_and_one_without_requests_3(tmp_path: Path) -> None:
    requests = log(tmp_path, request(0, 3.0))

    assert grade(requests, ["ttft"])[1] == 1
    assert grade(requests, ["ttft-by-length"])[1] == 1, "the short prompts missed theirs"
    only_long = tmp_path / "long.yaml"
    only_long.write_text(
        TTFT.replace("  annotations:\n", '  annotations:\n    prefixwatch.dev/prompt-length: "512+"\n')
    )
    assert grade(requests, [str(only_long)])[1] == 3


def test_classes_pick_the_requests(tmp_path: Path) -> None:
    slow = {"prompt_tokens": 5000, "planned_prompt_tokens": 5000, "tenant": "batch", "turn": 1}
    requests = log(tmp_path, *(request(k, 0.1) for k in range(9)), request(9, 9.0, **slow))

    def graded(annotation: str) -> tuple[int, int]:
        path = tmp_path / "own.yaml"
        path.write_text(TTFT.replace("  annotations:\n", f"  annotations:\n    prefixwatch.dev/{annotation}\n"))
        row = grade(requests, [str(path)])[0]["policies"]["score"][0]
        return row["good"], row["total"]

    assert graded('prompt-length: "0-512"') == (9, 9)
    assert graded('prompt-length: "2048-8192"') == (0, 1)
    assert graded("tenant: batch") == (0, 1)
    assert graded("session-turn: first") == (9, 9)
    assert graded("session-turn: later") == (0, 1)


def test_an_slo_for_rules_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="used for rules but not to grade"):
        grade(log(tmp_path, request(0, 0.1)), ["miss-cost"])


def test_what_is_no_request_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "requests.parquet").write_text("no")

    with pytest.raises(UsageError, match=r"not a readable Parquet file .*give a run's requests.parquet"):
        grade(tmp_path / "requests.parquet", ["ttft"])


def test_the_command_line_says_what_is_wrong_and_ends_with_2(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(TTFT.replace("target: 0.95", "target: 1"))
    command = [sys.executable, "-m", "stack.cli", "slo"]

    done = subprocess.run([*command, "check", str(bad)], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert f"error: {bad}:26: spec.objectives[0]: a target of 100 % leaves no error budget" in done.stderr


@pytest.mark.parametrize("command", ["check", "build", "grade"])
def test_each_command_shows_an_example(command: str) -> None:
    arguments = [sys.executable, "-m", "stack.cli", "slo", command, "--help"]

    shown = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout

    assert f"Example: prefixwatch slo {command} " in " ".join(shown.split())
