"""`prefixwatch up`: the whole stack starts, answers, is scraped by a real Prometheus, and stops without a trace."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prefixwatch.engines.process import free_ports
from prefixwatch.router.config import WorkerConfig
from prefixwatch.stack.config import PrefixwatchConfig
from prefixwatch.stack.local.demo import demo_traffic, next_lines, traffic_lines, with_places_and_price, with_probes
from prefixwatch.stack.local.up import with_free_ports
from tests.stack.command_line import prefixwatch_process

CONFIG = """\
fleet: {{workers: 2}}
router: {{port: {router}}}
exporter: {{listen: "127.0.0.1:{exporter}", interval_seconds: 1}}
"""
ONE_ENGINE = "fleet: {targets: [{name: w0, url: 'http://127.0.0.1:1'}]}\n"


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


def test_the_demo_has_two_zones_a_price_and_probes_and_leaves_what_is_configured() -> None:
    demo = with_places_and_price(PrefixwatchConfig())
    assert [(kind.zone, kind.node) for kind in demo.fleet.kinds] == [
        ("zone-a", "node-0"), ("zone-a", "node-1"), ("zone-b", "node-2"), ("zone-b", "node-3"),
    ]  # fmt: skip
    assert demo.pricing.gpu_usd_per_hour == 2.5
    priced = PrefixwatchConfig.model_validate({"pricing": {"gpu_usd_per_hour": 4}})
    assert with_places_and_price(priced).pricing.gpu_usd_per_hour == 4
    probed = with_probes(demo, [WorkerConfig(name="w0", url="http://127.0.0.1:1")])
    assert probed.exporter.probes is not None
    assert [target.name for target in probed.exporter.probes.targets] == ["w0"]
    assert with_probes(probed, []) is probed


def test_printed_lines_name_the_stacks_own_addresses() -> None:
    lines = next_lines("http://127.0.0.1:2", "http://127.0.0.1:3")
    assert [line.split()[1] for line in lines] == ["status", "dashboards", "diagnose"]
    assert len(next_lines("http://127.0.0.1:2", None)) == 1


def test_printed_lines_say_how_to_send_traffic() -> None:
    """Engines of somebody else have a tokenizer and a model that only they know."""
    bench, locust = traffic_lines("http://127.0.0.1:1", Path("/m"), "tiny")
    assert bench == "prefixwatch bench shared-prefix --target http://127.0.0.1:1 --model-dir /m"
    assert locust.startswith("locust -f ")
    assert Path(locust.split()[2]).is_file()
    assert "--host http://127.0.0.1:1 --model tiny --model-dir /m" in locust
    assert traffic_lines("http://h:1", None, None) == ["prefixwatch bench shared-prefix --target http://h:1"]


async def test_the_demos_tenants_chat_under_a_salt_each_until_it_ends() -> None:
    """Openings are common to the tenants: without salts their reuse would be a leak."""
    chats: list[tuple[str, str]] = []
    enough = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        chats.append((request.headers["x-tenant-id"], (await request.json())["cache_salt"]))
        if len(chats) >= 12:
            enough.set()
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as router:
        async with demo_traffic(str(router.make_url("")).rstrip("/"), 200.0), asyncio.timeout(20):
            await enough.wait()
        sent = len(chats)
        async with demo_traffic(str(router.make_url("")).rstrip("/"), 0.0):
            await asyncio.sleep(0.05)

    assert set(chats) == {(name, f"salt of {name}") for name in ("acme", "globex", "initech")}
    assert len(chats) == sent


def test_traffic_goes_to_the_demos_engines_only(tmp_path: Path) -> None:
    config = tmp_path / "prefixwatch.yaml"
    config.write_text(ONE_ENGINE)
    result = prefixwatch_process("up", "--config", str(config), "--traffic", "1", "--folder", str(tmp_path / "up"))
    assert result.code == 2
    assert "--traffic: goes to the demo's engines only: leave out --config" in result.err


@pytest.mark.prometheus
def test_the_stack_comes_up_measures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    router_port, exporter_port = free_ports(2)
    config = tmp_path / "prefixwatch.yaml"
    config.write_text(CONFIG.format(router=router_port, exporter=exporter_port))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "prefixwatch", "up", "--config", str(config), "--folder", str(tmp_path / "up")],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        urls = _printed_urls(process)
        assert f"prefixwatch bench shared-prefix --target {urls['router'].removesuffix('/v1')} " in urls["printed"]
        assert "It sends no traffic of its own" in urls["printed"]
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
        next(child for child in children if "prometheus.yml" in " ".join(child.cmdline())).kill()
        assert "The stack runs on without prometheus." in _printed_until(process, "The stack runs on")
        assert chat(urls["router"])["usage"]["prompt_tokens"] > 0
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert psutil.wait_procs(children, timeout=10)[1] == []
    finally:
        process.kill()


def _printed_urls(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    urls: dict[str, str] = {"printed": ""}
    for line in process.stdout:
        urls["printed"] += line
        if line.startswith("Ctrl-C"):
            return urls
        if found := re.match(r"\s*(\S+)\s+(http\S+)", line):
            urls[found[1]] = found[2].rstrip("/")
    raise AssertionError(f"up ended with code {process.wait()} before it was ready")


def _printed_until(process: subprocess.Popen[str], beginning: str) -> str:
    assert process.stdout is not None
    return next(line for line in process.stdout if line.startswith(beginning))


def test_somebody_else_on_the_routers_port_is_said_before_anything_is_called_ready(tmp_path: Path) -> None:
    """vLLM listens on 8000, too, and answers /health."""

    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        config = tmp_path / "prefixwatch.yaml"
        config.write_text(f"{ONE_ENGINE}router: {{policy: {{name: round_robin}}}}\n")
        port = str(other.server_port)
        result = prefixwatch_process("up", "--config", str(config), "--port", port, "--folder", str(tmp_path / "up"))
        other.shutdown()
    assert result.code == 2
    assert "Ctrl-C" not in result.out
    assert f"can't listen on 127.0.0.1:{port}" in result.err
    assert "choose another port" in result.err


def test_a_full_disk_names_the_folder_and_the_remedy(tmp_path: Path) -> None:
    config = tmp_path / "prefixwatch.yaml"
    config.write_text(f"{ONE_ENGINE}router: {{port: 0}}\n")
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "from prefixwatch.stack.cli.main import main; main(sys.argv[1:])"
    )
    folder = tmp_path / "up"
    command = [sys.executable, "-P", "-c", code, "up", "--config", str(config), "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2, done.stderr
    assert f"error: --folder {folder}: can't be written to (File too large): make room, or choose" in done.stderr
    assert "Traceback" not in done.stderr


def _eventually(prometheus: str, query: str, wanted: float) -> None:
    """Wait until the query has this value; a scrape may show less of what has happened."""
    deadline, value = time.monotonic() + 60, None
    while value != wanted:
        assert time.monotonic() < deadline, f"{query} is {value}, not {wanted}"
        result = get(f"{prometheus}/api/v1/query?query={urllib.parse.quote(query)}")["data"]["result"]
        value = float(result[0]["value"][1]) if result else None
        time.sleep(0.2)
