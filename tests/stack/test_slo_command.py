"""`prefixwatch slo`: exit codes and what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from prefixwatch.alerts.build import RULES
from prefixwatch.alerts.settings import RuleSettings
from prefixwatch.documents import DocumentError
from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.request_log.records import Outcome, RequestRecord, write_requests
from prefixwatch.slo.read import SHIPPED
from prefixwatch.stack.cli.slo import BuildOptions, check, run_build
from prefixwatch.stack.cli.slo_grade import grade
from prefixwatch.stack.errors import UsageError
from tests.stack.command_line import prefixwatch

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
    with pytest.raises(InputError):
        RuleSettings(scrape_interval_seconds=600)
    assert issubclass(DocumentError, InputError)


def test_a_request_log_is_graded_by_policy(tmp_path: Path) -> None:
    requests = log(tmp_path, *(request(k, 0.1) for k in range(200)))

    found, code = grade(requests, ["ttft"])

    [row] = found["policies"]["score"]
    assert (row["name"], row["good"], row["total"], row["result"]) == ("ttft", 200, 200, "met")
    assert row["ci95"][0] > 0.95
    assert (found["verdict"], found["validity"], code) == ("pass", {"valid": True, "reasons": []}, 0)


def test_a_share_whose_interval_contains_the_objective_is_undecided(tmp_path: Path) -> None:
    """29 of 29 was "met" although Wilson's lower end is 88 %."""
    requests = log(tmp_path, *(request(k, 3.0 if k % 20 == 0 else 0.1) for k in range(200)))

    found, code = grade(requests, ["ttft"])

    [row] = found["policies"]["score"]
    assert (row["measured"], row["ok"], row["result"]) == (0.95, True, "undecided")
    assert (found["verdict"], code) == ("inconclusive", 3)


def test_too_few_requests_are_inconclusive_and_a_missed_objective_is_1(tmp_path: Path) -> None:
    found, code = grade(log(tmp_path, *(request(k, 0.1) for k in range(29))), ["ttft"])
    assert code == 3
    assert found["validity"]["reasons"] == [
        "score: too few requests (29, at least 50 needed): run longer or more repeats"
    ]
    slow = log(tmp_path, *(request(k, 3.0) for k in range(60)))
    assert grade(slow, ["ttft"])[1] == 1
    assert grade(slow, ["ttft-by-length"])[1] == 1, "the short prompts missed theirs"
    only_long = tmp_path / "long.yaml"
    only_long.write_text(
        TTFT.replace("  annotations:\n", '  annotations:\n    prefixwatch.dev/prompt-length: "512+"\n')
    )
    assert grade(slow, [str(only_long)])[1] == 3, "no request counts"


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

    with pytest.raises(InputError, match=r"not a readable Parquet file .*give a run's requests.parquet"):
        grade(tmp_path / "requests.parquet", ["ttft"])


def test_the_command_line_says_what_is_wrong_and_ends_with_2(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(TTFT.replace("target: 0.95", "target: 1"))

    done = prefixwatch("slo", "check", str(bad))

    assert done.code == 2
    assert f"error: {bad}:26: spec.objectives[0]: a target of 100 % leaves no error budget" in done.err
