"""`prefixwatch up`: the whole stack starts, answers, is scraped by a real Prometheus, and stops without a trace."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.process import free_ports
from stack.config import PrefixwatchConfig
from stack.up import with_free_ports

CONFIG = """\
fleet: {{workers: 2}}
router: {{port: {router}}}
exporter: {{listen: "127.0.0.1:{exporter}", interval_seconds: 1}}
"""


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def chat(url: str) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "carpet ratio differ " * 40}], "max_tokens": 2}
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def test_a_port_of_0_is_given_before_anybody_is_told_of_it() -> None:
    config = PrefixwatchConfig.model_validate({"router": {"port": 0}, "exporter": {"listen": "[::1]:0"}})
    given = with_free_ports(config)
    host, _, port = given.exporter.listen.rpartition(":")
    assert host == "[::1]"
    assert 0 < int(port) != given.router.port > 0
    assert with_free_ports(given) == given


@pytest.mark.prometheus
def test_the_stack_comes_up_measures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    router_port, exporter_port = free_ports(2)
    config = tmp_path / "prefixwatch.yaml"
    config.write_text(CONFIG.format(router=router_port, exporter=exporter_port))
    process = subprocess.Popen(
        [sys.executable, "-m", "stack.cli", "up", "--config", str(config), "--folder", str(tmp_path / "up")],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        urls = _printed_urls(process)
        cached = [chat(urls["router"])["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
        assert cached[0] == 0
        assert cached[1] > 0
        _eventually(urls["Prometheus"], "sum(prefixwatch_prefix_hit_tokens_total)", cached[1])
        _eventually(urls["Prometheus"], "count(prefixwatch_target_up == 1)", 3)
        _eventually(urls["Prometheus"], 'prefixwatch_requests_total{class="default",outcome="completed"}', 2)
        _eventually(urls["Prometheus"], "prefixwatch_isolation_audited_requests_total", 2)
        groups = get(f"{urls['Prometheus']}/api/v1/rules")["data"]["groups"]
        health = {rule["health"] for group in groups for rule in group["rules"]}
        assert len(groups) > 20
        assert "err" not in health
        if "Alertmanager" in urls:
            assert get(f"{urls['Alertmanager']}/api/v2/status")["cluster"]["status"] == "disabled"
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert psutil.wait_procs(children, timeout=10)[1] == []
    finally:
        process.kill()


def _printed_urls(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    urls: dict[str, str] = {}
    for line in process.stdout:
        if line.startswith("Ctrl-C"):
            return urls
        if found := re.match(r"\s*(\S+)\s+(http\S+)", line):
            urls[found[1]] = found[2].rstrip("/")
    raise AssertionError(f"up ended with code {process.wait()} before it was ready")


def _eventually(prometheus: str, query: str, wanted: float) -> None:
    """Wait until the query has this value; a scrape may show less of what has happened."""
    deadline, value = time.monotonic() + 60, None
    while value != wanted:
        assert time.monotonic() < deadline, f"{query} is {value}, not {wanted}"
        result = get(f"{prometheus}/api/v1/query?query={urllib.parse.quote(query)}")["data"]["result"]
        value = float(result[0]["value"][1]) if result else None
        time.sleep(0.2)
