"""What a newcomer gets wrong: exit code 2, one message, and what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from stack.cli import main

MESSAGES = [
    (["bench"], "give a scenario or a recording: prefixwatch bench SCENARIO (`prefixwatch scenarios` lists them)"),
    (["bench", "shared-prefx"], "did you mean 'shared-prefix'?"),
    (["bench", "smoke", "--policy", "best"], "--policy: unknown policy 'best'; known policies: round_robin"),
    (["bench", "smoke", "--speed", "2"], "--speed: only with --trace FILE"),
    (["bench", "smoke", "--out", "{file}/x"], "--out {file}/x: can't be made (Not a directory): choose another folder"),
    (["bench", "smoke", "--target", "http://h:80", "--model-dir", "{tmp}"], "no tokenizer.json in {tmp}"),
    (["bench", "smoke", "--sweep-rate", "a"], "--sweep-rate a: give numbers with commas between them"),
    (["simulate"], "give a scenario or a trace: prefixwatch simulate SCENARIO"),
    (["simulate", "smoke", "--speed", "2"], "--speed and --limit are for traces"),
    (["simulate", "smoke", "--arrivals", "now"], "--arrivals now: choose one of auto, serial, trace"),
    (["compare", "{tmp}/a", "{tmp}/b"], "{tmp}/a: no such folder: give the --out folder of a bench"),
    (["report", "{tmp}"], "{tmp} is not the folder of a finished bench"),
    (["analyze", "nothing"], "nothing: no such recording, and no such scenario: give a file, or one of agent-loop"),
    (["analyze", "smoke", "--format", "mooncake"], "--format: smoke is a scenario"),
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
    names = {"{tmp}": str(tmp_path), "{file}": str(tmp_path / "file")}

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
