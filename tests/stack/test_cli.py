"""Commands as a newcomer runs them: help with an example, and one message with exit code 2 for what is wrong."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.stack.cli.main import COMMANDS
from prefixwatch.stack.drill.faults import FAULTS
from tests.stack.command_line import prefixwatch, prefixwatch_process, whole_command


def every_command(below: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Commands of all groups, and the groups that do something by themselves."""
    found = [path] if path and (not hasattr(below, "commands") or below.invoke_without_command) else []
    for name, command in getattr(below, "commands", {}).items():
        found += every_command(command, (*path, name))
    return found


@pytest.mark.parametrize("command", every_command(whole_command()), ids=" ".join)
def test_every_command_explains_itself_with_an_example(command: tuple[str, ...]) -> None:
    result = prefixwatch(*command, "--help")
    assert result.code == 0
    assert f"Example: `prefixwatch {' '.join(command)}" in " ".join(result.out.split())


def test_the_overview_has_each_commands_first_line_or_a_shorter_one() -> None:
    for commands in COMMANDS.values():
        for name, (_, line) in commands.items():
            assert len(line) <= 90
            assert not whole_command().commands[name].hidden
    assert sum(map(len, COMMANDS.values())) == len(whole_command().commands)


def options(command: tuple[str, ...]) -> list[Any]:
    found = whole_command()
    for name in command:
        found = found.commands[name]
    return [one for one in found.params if one.param_type_name == "option"]


@pytest.mark.parametrize("command", every_command(whole_command()), ids=" ".join)
def test_a_flag_takes_no_value_and_long_lists_are_grouped(command: tuple[str, ...]) -> None:
    text = prefixwatch(*command, "--help").out
    flags = [name for one in options(command) if one.is_flag for name in one.opts]
    for name in flags:
        assert not re.search(rf"{name} <", text), name
    assert "<bool>" not in text
    if len(options(command)) > 8:
        assert re.findall(r"^(\w+):$", text, re.MULTILINE)[-4:-1] or command == ("diagnose",)
        assert re.search(r"^Target:$", text, re.MULTILINE) or re.search(r"^Output:$", text, re.MULTILINE)


@pytest.mark.parametrize("command", [("bench",), ("simulate",)])
def test_bench_and_simulate_group_their_options_by_target_and_load(command: tuple[str, ...]) -> None:
    headings = re.findall(r"^(\w+):$", prefixwatch(*command, "--help").out, re.MULTILINE)
    assert headings == ["Arguments", "Target", "Load", "Output", "Options"]
    ungrouped = [one.name for one in options(command) if one.rich_help_panel is None]
    assert ungrouped == []


def test_the_version_is_printed() -> None:
    result = prefixwatch("--version")
    assert (result.code, result.out) == (0, f"prefixwatch {version('prefixwatch')}\n")


def test_shells_can_complete_commands_and_options() -> None:
    environment = {"_PREFIXWATCH_COMPLETE": "complete_bash", "COMP_WORDS": "prefixwatch bench --swe", "COMP_CWORD": "2"}
    code = "from prefixwatch.stack.cli.main import app; app(prog_name='prefixwatch')"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["--sweep-rate", "--sweep-concurrency"], done.stderr


def test_the_overview_imports_nothing_that_runs() -> None:
    """What keeps `prefixwatch --help` below a quarter of a second: numpy, pydantic, rich and aiohttp stay out."""
    code = (
        "import sys; from prefixwatch.stack.cli.main import main\n"
        "try: main(['--help'])\n"
        "finally: print(*sorted({'numpy', 'numba', 'pydantic', 'yaml', 'rich', 'aiohttp'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "policies  List the routing policies." in done.stdout
    assert done.stdout.endswith("policies.\n\n")


def test_drills_are_listed() -> None:
    assert "hot-prefix" in prefixwatch("drill", "--list").out
    assert {"name": "none", "title": FAULTS["none"].title} in json.loads(prefixwatch("drill", "--list", "--json").out)[
        "faults"
    ]


SERVICES = ("exporter", "up", "router")
NO_FILE = "no/such/file"
BAD_SCENARIO = "name: x\nduration_seconds: 1\narrivals: {rate_per_second: 1}\ngruops: {}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "shared-prefx"], r"no scenario 'shared-prefx': did you mean 'shared-prefix'\?"),
        (["bench", "{tmp}/bad.yaml"], r"bad\.yaml:4: gruops: .*did you mean 'groups'\?"),
        (["bench", "no[/x].yaml"], r"no scenario 'no\[/x\]\.yaml': use one of "),
        (["exporter", "--target", "http://[x]", "--once"], r"--target http://\[x\]: is not a URL"),
        (["bench", "smoke", "--policy", "cache_awre"], r"unknown policy 'cache_awre': did you mean 'cache_aware'\?"),
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
        (["simulate"], r"give a scenario or a recording"),
        (["simulate", "--trace", f"{NO_FILE}.jsonl"], r"no/such/file\.jsonl: can't be read: No such file"),
        (["simulate", "--trace", "{tmp}/bad.yaml"], r"bad\.yaml:1: no known kind of recording"),
        (["simulate", "smoke", "--arrivals", "later"], r"--arrivals later: choose one of auto, serial, trace"),
        (["up", "--config", NO_FILE], r"no/such/file: can't be read: No such file"),
        (["router", "--config", "{tmp}/empty.yaml"], r"empty\.yaml: fleet\.targets: lists no engine"),
        (["exporter"], r"no target: give --target \[NAME=\]URL"),
        (["exporter", "--target", "http://127.0.0.1:1", "--once"], r"target 127\.0\.0\.1:1 .*: refused"),
        (["exporter", "--target", "ftp://x", "--once"], r"'ftp://x' is not an http\(s\) URL"),
        (["engines", "install", "sglang"], r"'sglang' can't be installed: the engine to install is vllm"),
        (["engines", "model", "/proc/x"], r"/proc/x: the model can't be written \(.*\): choose another folder"),
        (["engine", "--config", "{tmp}/bad.yaml"], r"bad\.yaml:1: name: unknown key"),
        (["engine", "--config", NO_FILE], r"no/such/file: can't be read: No such file"),
        (["drill", "gremlins"], r"no fault 'gremlins': use one of none, hot-prefix, .*; --list shows them all"),
        (["drill", "hot-prefx"], r"no fault 'hot-prefx': did you mean 'hot-prefix'\?; --list shows them all"),
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
    result = (prefixwatch_process if arguments[0] in SERVICES else prefixwatch)(*given)
    assert result.code == 2, result.out + result.err
    assert "Traceback" not in result.err
    assert re.search(message, " ".join(result.err.split())), result.err


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
        result = prefixwatch_process(*arguments)
    assert result.code == 2, result.out + result.err
    assert "Traceback" not in result.err
    assert re.search(rf"can't listen on 127\.0\.0\.1:{port}: .*in use", " ".join(result.err.split()))


def test_policies_are_listed_as_json() -> None:
    listed = {policy["name"]: policy for policy in json.loads(prefixwatch("policies", "--json").out)}
    assert {"round_robin", "least_load", "power_of_two", "prefix_hash", "cache_aware", "score"} <= listed.keys()
    assert set(listed["score"]) >= {"name", "source", "needs", "defaults"}
    assert listed["prefix_hash"]["defaults"]["prefix_token_count"] == 256
