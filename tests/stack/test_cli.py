"""Commands as a newcomer runs them: help with an example, and one message with exit code 2 for what is wrong."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from engines.tiny_model import default_model_dir
from stack.cli import app


def prefixwatch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stack.cli", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def every_command(below: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Commands of all groups, and the groups that do something by themselves."""
    found = [path] if path and (not hasattr(below, "commands") or below.invoke_without_command) else []
    for name, command in getattr(below, "commands", {}).items():
        found += every_command(command, (*path, name))
    return found


@pytest.mark.parametrize("command", every_command(get_command(app)), ids=" ".join)
def test_every_command_explains_itself_with_an_example(command: tuple[str, ...]) -> None:
    result = prefixwatch(*command, "--help")
    assert result.returncode == 0
    assert f"Example: prefixwatch {' '.join(command)}" in " ".join(result.stdout.split())


NO_FILE = "no/such/file"
BAD_SCENARIO = "name: x\nduration_seconds: 1\narrivals: {rate_per_second: 1}\ngruops: {}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "shared-prefx"], r"no scenario 'shared-prefx': did you mean 'shared-prefix'\?"),
        (["bench", "{tmp}/bad.yaml"], r"bad\.yaml:4: gruops: .*did you mean 'groups'\?"),
        (["bench", "no[/x].yaml"], r"no scenario 'no\[/x\]\.yaml': give a path"),
        (["exporter", "--target", "http://[x]", "--once"], r"--target http://\[x\]: is not a URL"),
        (["bench", "smoke", "--policy", "cache_awre"], r"unknown policy 'cache_awre' \(did you mean cache_aware\?\)"),
        (["bench", "smoke", "--engine", "tgi"], r"no engine 'tgi': choose one of simulated, vllm"),
        (
            ["bench", "smoke", "--model-dir", NO_FILE],
            r"no tokenizer\.json in no/such/file: .*prefixwatch engines model",
        ),
        (["bench", "smoke", "--tokenize-url", "http://h:1"], r"--tokenize-url goes with --target, and without --model"),
        (
            ["bench", "smoke", "--target", "http://127.0.0.1:1", "--model-dir", "{model}"],
            r"http://127\.0\.0\.1:1/v1/models can't be read .*start it first",
        ),
        (["simulate"], r"give a scenario or a trace"),
        (["simulate", "--trace", f"{NO_FILE}.jsonl"], r"can't read the trace no/such/file\.jsonl: No such file"),
        (["simulate", "--trace", "{tmp}/bad.yaml"], r"bad\.yaml, line 1: .*a line is a JSON object with timestamp"),
        (["simulate", "smoke", "--arrivals", "later"], r"--arrivals later: choose one of auto, serial, trace"),
        (["up", "--config", NO_FILE], r"no/such/file: can't be read: No such file"),
        (["router", "--config", "{tmp}/empty.yaml"], r"empty\.yaml: fleet\.targets: lists no engine"),
        (["exporter"], r"no target: give --target \[NAME=\]URL"),
        (["exporter", "--target", "http://127.0.0.1:1", "--once"], r"target 127\.0\.0\.1:1 .*: refused"),
        (["exporter", "--target", "ftp://x", "--once"], r"'ftp://x' is not an http\(s\) URL"),
        (["engines", "install", "sglang"], r"'sglang' can't be installed: the engine to install is vllm"),
    ],
)
def test_wrong_input_ends_with_code_2_and_one_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(BAD_SCENARIO)
    (tmp_path / "empty.yaml").write_text("fleet: {}\n")
    folders = {"{tmp}": str(tmp_path), "{model}": str(default_model_dir())}
    given = list(arguments)
    for name, folder in folders.items():
        given = [argument.replace(name, folder) for argument in given]
    if arguments[0] == "bench":
        given += ["--out", str(tmp_path / "out")]
    result = prefixwatch(*given)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert re.search(message, " ".join(result.stderr.split())), result.stderr


@pytest.mark.parametrize("command", ["exporter", "up", "router"])
def test_a_port_in_use_is_named(command: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = tmp_path / "prefixwatch.yaml"
        workers = f"targets: [{{name: w0, url: 'http://127.0.0.1:{port}'}}]"
        config.write_text(f"fleet: {{{workers}}}\nrouter: {{port: {port}, policy: {{name: round_robin}}}}\n")
        arguments = {
            "exporter": ["exporter", "--target", f"http://127.0.0.1:{port}", "--listen", f"127.0.0.1:{port}"],
            "up": ["up", "--config", str(config), "--folder", str(tmp_path / "up")],
            "router": ["router", "--config", str(config)],
        }[command]
        result = prefixwatch(*arguments)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert re.search(rf"can't listen on 127\.0\.0\.1:{port}: .*in use", " ".join(result.stderr.split()))


def test_policies_are_listed_as_json() -> None:
    listed = {policy["name"]: policy for policy in json.loads(prefixwatch("policies", "--json").stdout)}
    assert {"round_robin", "least_load", "power_of_two", "prefix_hash", "cache_aware", "score"} <= listed.keys()
    assert set(listed["score"]) >= {"name", "source", "needs", "defaults"}
    assert listed["prefix_hash"]["defaults"]["prefix_token_count"] == 256
