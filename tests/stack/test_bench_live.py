"""The live page of a bench while it runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console

from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.stack.bench.bench import run_bench
from prefixwatch.stack.bench.options import BenchOptions
from prefixwatch.stack.errors import UsageError


@pytest.mark.timeout(240)
def test_the_page_is_there_while_the_bench_runs_and_gone_after(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "prefixwatch", "bench", "smoke", "--workers", "2", "--repeats", "1"]
    command += ["--policy", "cache_aware", "--live", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        url = next(found[1] for line in process.stdout if (found := re.search(r"live page: (\S+)", line)))
        with urllib.request.urlopen(url, timeout=10) as answer:
            page = answer.read().decode()
        said = process.stdout.read()
        assert process.wait(timeout=90) in (0, 1, 3), said
    finally:
        process.kill()
    (sent,) = (tmp_path / "out" / "logs").glob("*/load.json")
    assert json.loads(sent.read_text())["session_suffix"] == "1"  # the exporter would count equal ids as one session
    names = re.findall(r'title="http://127\.0\.0\.1:\d+/metrics">(\S+)</th>', page)
    assert sorted(names) == ["router", "simulated-0", "simulated-1"]
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(url, timeout=2)


def test_a_bench_of_a_running_endpoint_has_none(tmp_path: Path) -> None:
    options = BenchOptions(
        scenario="smoke", target="http://127.0.0.1:1", model_dir=default_model_dir(), live=True, out=tmp_path / "out"
    )
    with pytest.raises(UsageError, match="`prefixwatch exporter`"):
        run_bench(options, Console())
