"""`prefixwatch analyze` on a log: causes and what mending them gives, capacity, the page, and a new template."""

from __future__ import annotations

import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.traffic.analyze import AnalyzeOptions, run_analyze

RULES = "Answer politely and name the article of the handbook that you rely on. " * 12


def log(folder: Path, *, clean: bool = False) -> Path:
    """What an agent framework sends: the time and an id in the system prompt, tools in any order."""
    draw = random.Random(3)
    rows = []
    for k in range(40):
        head = "" if clean else f"Now: 2026-11-30T21:{k:02}:07Z\nRequest id: req_{k:04}f{k * 7919:x}\n"
        tools = [
            {"type": "function", "function": {"name": f"tool_{name}", "description": RULES[:90], "parameters": {}}}
            for name in "abcdef"
        ]
        rows.append({
            "timestamp": 1_760_000_000 + k, "tenant": f"team-{k % 2}",
            "tools": tools if clean else draw.sample(tools, 6),
            "messages": [{"role": "system", "content": head + RULES}, {"role": "user", "content": f"Question {k}"}],
        })  # fmt: skip
    file = folder / "log.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def analyzed(file: Path, **options: Any) -> tuple[dict[str, Any], int, str]:
    console = Console(file=io.StringIO(), width=200)
    found, code = run_analyze(AnalyzeOptions(str(file), **options), console)
    return found, code, console.file.getvalue()  # type: ignore[attr-defined]


def with_template(folder: Path, change: Any) -> Path:
    """The tiny model with another chat template."""
    shutil.copytree(default_model_dir(), folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "chat_template": change(config["chat_template"])}))
    return folder


def test_a_log_is_diagnosed_and_mending_it_gives_what_was_promised(tmp_path: Path) -> None:
    found, code, text = analyzed(log(tmp_path))
    causes = {cause["kind"]: cause for cause in found["diagnosis"]["causes"]}
    assert code == 0
    assert set(causes) == {"time", "id", "tools", "all of these"}
    assert causes["time"]["ratio_after"] < 0.2  # the id and the tools hide it
    together = causes["all of these"]
    assert found["infinite_cache"]["hit_ratio"] < 0.2
    assert together["ratio_after"] > 0.85
    assert together["gpu_seconds"] > 0
    assert "put the time at the end of the prompt" in text.replace("\n", " ")
    clean, _, _ = analyzed(log(tmp_path, clean=True))
    assert clean["diagnosis"]["causes"] == []
    assert clean["infinite_cache"]["hit_ratio"] == pytest.approx(together["ratio_after"], abs=0.05)
    assert {row["tenant"] for row in found["diagnosis"]["tenants"]} == {"team-0", "team-1"}
    assert set(found["diagnosis"]["by_block_size"]) == {16, 32, 64, 128}


def test_the_curve_has_lru_frequency_and_the_bound(tmp_path: Path) -> None:
    found, _, _ = analyzed(log(tmp_path, clean=True))
    for point in found["curve"]:
        assert point["lru"] <= point["clairvoyant"] <= found["infinite_cache"]["block_hit_ratio"]
        assert point["frequency"] <= point["clairvoyant"]
    assert found["curve"][-1]["lru"] == found["infinite_cache"]["block_hit_ratio"]


def test_a_template_that_loses_reuse_fails_the_check(tmp_path: Path) -> None:
    """A line with the last message in front of all: nothing is shared any more."""
    file = log(tmp_path, clean=True)
    new = with_template(tmp_path / "new", lambda template: "{{ messages[-1]['content'] }}\n" + template)
    found, code, text = analyzed(file, model_dir=new, against=default_model_dir())
    assert code == 1
    assert found["against"]["lost_points"] > 50
    assert "the new tokenizer and template loses reuse" in text
    same, code, text = analyzed(file, model_dir=default_model_dir(), against=new)
    assert code == 0
    assert same["against"]["lost_points"] < -50
    assert "points more." in text
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    with pytest.raises(UsageError, match="has no texts, so that no tokenizer changes anything"):
        analyzed(trace, against=new)


def test_the_page_has_every_table(tmp_path: Path) -> None:
    page = tmp_path / "reuse.html"
    analyzed(log(tmp_path), html=page)
    text = page.read_text()
    for title in ("What breaks reuse", "By tenant", "Reuse by tokens per block", "How much cache does it take?"):
        assert title in text
    assert "time stamps" in text
