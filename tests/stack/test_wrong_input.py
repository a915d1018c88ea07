"""What a newcomer gets wrong: exit code 2, one message, and what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from prefixwatch.documents import load_plain
from prefixwatch.loadgen.scenario.model import SHIPPED_FOLDER
from prefixwatch.stack.cli.main import main

MESSAGES = [
    (["bench"], "give a scenario or a recording: prefixwatch bench SCENARIO (`prefixwatch scenarios` lists them)"),
    (["bench", "shared-prefx"], "did you mean 'shared-prefix'?"),
    (["bench", "smoke", "--policy", "best"], "--policy: unknown policy 'best': use one of round_robin"),
    (["bench", "smoke", "--speed", "2"], "--speed: only with --trace FILE"),
    (["bench", "smoke", "--out", "{file}/x"], "--out {file}/x: can't be made (Not a directory): choose another folder"),
    (["bench", "smoke", "--target", "http://h:80", "--model-dir", "{tmp}"], "no tokenizer.json in {tmp}"),
    (["bench", "smoke", "--sweep-rate", "a"], "--sweep-rate a: give numbers with commas between them"),
    (["simulate"], "give a scenario or a recording: prefixwatch simulate SCENARIO"),
    (["simulate", "smoke", "--speed", "2"], "--speed: only of a recording; smoke is a scenario"),
    (["simulate", "smoke", "--arrivals", "now"], "--arrivals now: choose one of auto, serial, trace"),
    (
        ["simulate", "smoke", "--capacity-blocks", "2"],
        "capacity_blocks: 2 blocks of 16 tokens hold none of the requests: the smallest needs",
    ),
    (
        ["bench", "smoke", "--out", "{tmp}", "--metrics-listen", "127.0.0.1:99999"],
        "--metrics-listen 127.0.0.1:99999: write",
    ),
    (
        ["bench", "smoke", "--otlp", "http://127.0.0.1:99999"],
        "--otlp http://127.0.0.1:99999: give it as http://HOST:PORT",
    ),
    (["bench", "smoke", "--otlp", "http://a b:80"], "--otlp http://a b:80: give it as http://HOST:PORT"),
    (["bench", "smoke", "--grafana", "http://["], "--grafana http://[: give it as http://HOST:PORT"),
    (["bench", "smoke", "--tune", "loadaware.beta=nan,inf"], "--tune: 'nan' is not a value to compare: give finite"),
    (["simulate", "smoke", "--view", "snapshots:1e-7"], "--view snapshots:1e-7: write snapshots, or snapshots:5"),
    (
        ["simulate", "smoke", "--cache", "sticky{gpu_blocks=2}"],
        "capacity_blocks: 2 blocks of 16 tokens hold none of the",
    ),
    (["plan", "http://["], "plan http://[: give it as http://HOST:PORT"),
    (["plan", "http://127.0.0.1:abc"], "plan http://127.0.0.1:abc: give it as http://HOST:PORT"),
    (
        ["scale-advice", "--exporter", "http://127.0.0.1:abc"],
        "--exporter: http://127.0.0.1:abc/api/v1/scaling: nonnumeric",
    ),
    (["status", "--exporter", "http://127.0.0.1:abc"], "nonnumeric port: 'abc'; is it running"),
    (["simulate", "{scenario}"], "profile: no step time profile 'h900': choose one of a100-llama-8b"),
    (["compare", "{tmp}/a", "{tmp}/b"], "{tmp}/a: no such folder or file: give a run's folder"),
    (["compare", "{tmp}", "{tmp}", "--tolerance", "inf"], "--tolerance inf: give a finite number"),
    (["plan", "smoke", "--gpu-usd-per-hour", "inf"], "--gpu-usd-per-hour inf: give a finite number"),
    (["simulate", "smoke", "--prefill-policy", "score"], "belong to a split fleet: add --prefill-workers"),
    (
        ["simulate", "smoke", "--prefill-workers", "1", "--prefill-policy", "score,session"],
        "--prefill-policy names several policies, and prefill engines have one",
    ),
    (["simulate", "smoke", "--model-dir", "{tmp}"], "--model-dir: only of a recording; smoke is a scenario"),
    (["simulate", "{trace}", "--model-dir", "{tmp}"], "--model-dir: the recording has no texts for a tokenizer"),
    (["plan", "{trace}", "--model-dir", "{tmp}"], "--model-dir: the recording has no texts for a tokenizer"),
    (
        ["simulate", "smoke", "--policy", "loadaware{beta=1e300}"],
        "policy loadaware: option beta is 1e+300: give a number from 0 to 1,000,000",
    ),
    (["plan", "smoke", "--model-dir", "{tmp}"], "--model-dir: only of a recording; smoke is a scenario"),
    (["plan", "http://127.0.0.1:1", "--model-dir", "{tmp}"], "--model-dir: live requests have no texts"),
    (["simulate", "smoke", "--sweep-rate", "1", "--repeats", "5"], "--repeats: a sweep runs each level once"),
    (["bench", "smoke", "--search-rate", "--repeats", "5"], "--repeats: a sweep runs each level once"),
    (
        ["bench", "smoke", "--sweep-rate", "1", "--target", "http://h:80", "--exporter", "http://h:81"],
        "--exporter and --prometheus go with one level of load",
    ),
    (
        ["bench", "smoke", "--target", "http://h:80", "--policy", "score"],
        "--policy: a target routes by a policy of",
    ),
    (["bench", "smoke", "--target", "http://h:80", "--engine", "vllm"], "--engine: a target has engines of its own"),
    (["report", "{tmp}"], "{tmp} is not the folder of a finished run"),
    (["analyze", "nothing"], "nothing: no such recording, and no such scenario: give a file, or one of agent-loop"),
    (["analyze", "smoke", "--format", "mooncake"], "--format: only of a recording; smoke is a scenario"),
]


@pytest.mark.parametrize(("arguments", "message"), MESSAGES, ids=[" ".join(arguments) for arguments, _ in MESSAGES])
def test_one_message_with_a_remedy(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("")
    scenario = tmp_path / "scenario.yaml"
    shipped = load_plain(SHIPPED_FOLDER / "smoke.yaml")
    assert isinstance(shipped, dict)
    scenario.write_text(yaml.safe_dump({**shipped, "engine": {"workers": 2, "profile": "h900"}}))
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2]}\n')
    names = {"{tmp}": str(tmp_path), "{file}": str(tmp_path / "file")}
    names |= {"{scenario}": str(scenario), "{trace}": str(trace)}

    def filled(text: str) -> str:
        for name, value in names.items():
            text = text.replace(name, value)
        return text

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["prefixwatch", *map(filled, arguments)])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert filled(message) in errors
    assert "Traceback" not in errors
