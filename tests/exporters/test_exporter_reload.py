"""A new configuration while the exporter runs: taken when it is good, refused whole when it isn't."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from io import StringIO
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import yaml
from aiohttp import web

from prefixwatch.exporters.app import Reloader, once, running, serve
from prefixwatch.exporters.config import ExporterConfig, TargetConfig, validated
from prefixwatch.exporters.exporter import Exporter
from prefixwatch.exporters.http.web_config import WebSecurity
from prefixwatch.exporters.logs import FieldsFormatter, LogFormat
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.stack.config import load_config

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ServePages = Callable[[dict[str, bytes | Handler]], Awaitable[str]]

PAGE = b"vllm:num_requests_running{engine='0'} 1\n".replace(b"'", b'"')


class File:
    """The `exporter` section of a prefixwatch.yaml."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "prefixwatch.yaml"

    def write(self, **section: Any) -> None:
        self.path.write_text(yaml.safe_dump({"exporter": {"listen": "127.0.0.1:0", **section}}))

    def load(self) -> ExporterConfig:
        return load_config(self.path, {}).exporter_config([])


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path)


async def reload(exporter: Exporter) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.post(f"{exporter.url}/-/reload") as response:
        return response.status, await response.text()


def reload_succeeded(exporter: Exporter) -> bool:
    text = render(exporter.targets, "", exporter.sources)[0].decode()
    (line,) = [line for line in text.splitlines() if line.startswith("prefixwatch_config_last_reload_successful")]
    return line.endswith(" 1.0")


async def test_targets_are_added_and_removed_and_the_others_go_on(file: File, serve_pages: ServePages) -> None:
    url = await serve_pages({"/metrics": PAGE})
    file.write(targets=[{"name": "a", "url": url}, {"name": "b", "url": url}])
    async with running(file.load(), file.load) as exporter:
        kept = exporter.targets[0]
        file.write(targets=[{"name": "a", "url": url}, {"name": "c", "url": url}], interval_seconds="30s")
        assert await reload(exporter) == (200, "reloaded\n")
        assert [target.name for target in exporter.targets] == ["a", "c"]
        assert exporter.targets[0] is kept
        assert exporter.config.interval_seconds == 30
        assert reload_succeeded(exporter)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"targets": [{"name": "b", "url": "ftp://h"}]}, "exporter.targets[0].url: 'ftp://h' is not an http(s) URL"),
        ({"target": []}, "exporter.target: unknown key: did you mean 'targets'?"),
        ({"targets": [{"name": "b", "url": "h:1", "system": "vlm"}]}, "target b: unknown system 'vlm'; known:"),
        ({"targets": [{"name": "b", "url": "h:1"}], "listen": "127.0.0.1:1"}, "listen can't change"),
        ({"targets": [{"name": "b", "url": "h:1"}], "catalogue": "/nowhere"}, "there is no such folder"),
    ],
)
async def test_a_bad_configuration_is_refused_and_the_old_one_goes_on(
    file: File, serve_pages: ServePages, section: dict[str, Any], message: str
) -> None:
    file.write(targets=[{"name": "a", "url": await serve_pages({"/metrics": PAGE})}])
    async with running(file.load(), file.load) as exporter:
        good = file.path.read_text()
        file.write(**section)
        status, text = await reload(exporter)
        assert (status, text.startswith("refused, the old configuration stays in use: ")) == (500, True)
        assert message in text
        assert [target.name for target in exporter.targets] == ["a"]
        assert not reload_succeeded(exporter)
        file.path.write_text(good)
        assert (await reload(exporter))[0] == 200
        assert reload_succeeded(exporter)


async def test_new_intervals_and_limits_reach_every_part(file: File, serve_pages: ServePages) -> None:
    engine = "".join(f'vllm:num_requests_running{{model_name="{k}"}} 1\n' for k in range(4)).encode()
    targets = [{"name": "a", "url": await serve_pages({"/metrics": engine})}]
    file.write(targets=targets, interval_seconds="5s")
    async with running(file.load(), file.load) as exporter:
        await exporter.scrape_all()
        file.write(targets=targets, interval_seconds="60s", limits={"label_values": 2})
        assert (await reload(exporter))[0] == 200
        await exporter.scrape_all()
        assert exporter._cache.interval_seconds == 60
        assert exporter._scraper is not None
        assert exporter._scraper._pages.keep_seconds == 120
        assert exporter.fleet.retired.label_limit == 2
        store = exporter.targets[0].store
        assert store is not None
        assert {dict(labels)["model"] for labels in store.gauges_of("running_requests")} == {"0", "1", "other"}


async def test_a_fault_while_reloading_is_reported_and_ends_nothing(file: File, serve_pages: ServePages) -> None:
    """Whatever the reader raises: the reason is answered, the gauge is 0, and the next reload works."""
    file.write(targets=[{"name": "a", "url": await serve_pages({"/metrics": PAGE})}])
    faults: list[Exception] = [ValueError("month must be in 1..12"), RecursionError("too deep"), OSError("disk")]

    def load() -> ExporterConfig:
        if faults:
            raise faults[0]
        return file.load()

    async with running(file.load(), load) as exporter:
        while faults:
            status, text = await reload(exporter)
            assert (status, str(faults.pop(0)) in text) == (500, True)
            assert not reload_succeeded(exporter)
        assert (await reload(exporter))[0] == 200
        assert reload_succeeded(exporter)


async def test_certificates_are_renewed_after_a_refused_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    class Security:
        reads = 0

        def changed(self) -> bool:
            return True

        def prepare(self) -> None:
            self.reads += 1
            if self.reads == 2:
                read_twice.set()
            raise ValueError("month must be in 1..12")

    monkeypatch.setattr("prefixwatch.exporters.app._CERTIFICATES_EVERY_SECONDS", 0.0)
    loop, read_twice = asyncio.get_running_loop(), threading.Event()
    exporter = Exporter(ExporterConfig(targets=(TargetConfig(name="a", url="http://127.0.0.1:1"),)))
    await exporter.open()
    reloader = Reloader(exporter, None, cast(WebSecurity, Security()))
    renewing = asyncio.create_task(reloader.keep_certificates_fresh())
    assert await loop.run_in_executor(None, read_twice.wait, 20)
    renewing.cancel()
    await asyncio.gather(renewing, return_exceptions=True)
    await exporter.close()
    assert exporter.service.reload_problem.startswith("ValueError: month must be in 1..12")


async def test_a_changed_job_keeps_its_targets_while_it_is_looked_for_anew(file: File, serve_pages: ServePages) -> None:
    address = (await serve_pages({"/metrics": PAGE})).removeprefix("http://")
    groups = file.path.parent / "groups.json"
    groups.write_text(json.dumps([{"targets": [address], "labels": {"zone": "z"}}]))
    job: dict[str, Any] = {"job_name": "j", "file_sd_configs": [{"files": [str(groups)]}]}
    file.write(scrape_configs=[job])
    async with running(file.load(), file.load) as exporter:
        kept = exporter.targets[0]
        file.write(scrape_configs=[job, {"job_name": "k", "static_configs": [{"targets": ["127.0.0.1:1"]}]}])
        await reload(exporter)
        assert exporter.targets[0] is kept
        assert [target.name for target in exporter.targets] == [address, "127.0.0.1:1"]


async def test_sighup_reloads(file: File, serve_pages: ServePages) -> None:
    url = await serve_pages({"/metrics": PAGE})
    file.write(targets=[{"name": "a", "url": url}])
    reloaded = asyncio.Event()

    def load() -> ExporterConfig:
        loop.call_soon_threadsafe(reloaded.set)
        return file.load()

    loop = asyncio.get_running_loop()
    ready: asyncio.Future[str] = loop.create_future()
    serving = asyncio.create_task(serve(file.load(), ready.set_result, load))
    await asyncio.wait_for(ready, 20)
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.wait_for(reloaded.wait(), 20)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


def formatted(form: LogFormat, **extra: Any) -> str:
    record = logging.makeLogRecord(
        {"name": "prefixwatch.exporter", "levelname": "WARNING", "msg": "scrape failed", "created": 0.0, **extra}
    )
    return FieldsFormatter(form).format(record)


def test_a_log_line_is_logfmt_or_json() -> None:
    extra = {"target": "a", "detail": 'says "no"\nand more'}
    assert formatted("logfmt", **extra) == (
        'ts=1970-01-01T00:00:00.000Z level=warning logger=prefixwatch.exporter msg="scrape failed" '
        'target=a detail="says \\"no\\"\\nand more"'
    )
    assert json.loads(formatted("json", **extra)) == {
        "ts": "1970-01-01T00:00:00.000Z",
        "level": "warning",
        "logger": "prefixwatch.exporter",
        "msg": "scrape failed",
        **extra,
    }


async def test_no_secret_is_ever_logged_or_shown(tmp_path: Path, serve_pages: ServePages) -> None:
    """Tokens, passwords and keys in configuration, addresses and redirects; targets that work and that fail."""
    url = await serve_pages({"/metrics": PAGE})

    async def leads_away(_: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": "ftp://u:s3cret-8@h/?k=s3cret-9"})

    redirecting = await serve_pages({"/metrics": leads_away})
    (tmp_path / "token").write_text("s3cret-1\ns3cret-1")
    targets = [
        {"name": "a", "url": f"{url}/metrics?token=s3cret-2", "authorization": {"credentials": "s3cret-3"}},
        {"name": "b", "url": "127.0.0.1:1", "basic_auth": {"username": "u", "password": "s3cret-4"}},
        {"name": "c", "url": url, "authorization": {"credentials_file": str(tmp_path / "token")}},
        {"name": "d", "url": redirecting, "http_headers": {"X-Key": "s3cret-5"}},
    ]
    jobs = [
        {
            "job_name": "j",
            "http_sd_configs": [{"url": f"{url}/sd?key=s3cret-6", "authorization": {"credentials": "s3cret-7"}}],
        },
        {"job_name": "k", "static_configs": [{"targets": ["u:s3cret-10@h:1"]}]},
    ]
    log = StringIO()
    handler = logging.StreamHandler(log)
    handler.setFormatter(FieldsFormatter("json"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    shown: list[str] = []
    config = validated({"targets": targets, "scrape_configs": jobs, "listen": "127.0.0.1:0"}, "test")
    try:
        async with running(config) as exporter, aiohttp.ClientSession() as session:
            await exporter.scrape_all()
            for path in ("/", "/metrics", "/api/v1/fleet"):
                async with session.get(exporter.url + path) as response:
                    shown.append(await response.text())
        text, failed = await once(config)
        shown += [text, *failed, log.getvalue()]
    finally:
        root.removeHandler(handler)
        root.setLevel(logging.WARNING)
    assert "scrape failed" in log.getvalue()
    assert [one for one in shown if "s3cret" in one] == []


async def test_a_refused_configuration_is_told_without_its_secrets(file: File, serve_pages: ServePages) -> None:
    file.write(targets=[{"name": "a", "url": await serve_pages({"/metrics": PAGE})}])
    async with running(file.load(), file.load) as exporter:
        file.write(targets=[{"name": "a", "url": "http://u:s3cret@h"}, {"name": "b", "url": "ftp://h/?token=s3cret"}])
        status, text = await reload(exporter)
        assert status == 500
        assert "put them into basic_auth" in text
        assert "s3cret" not in text
