from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from prefixwatch.documents import DocumentError, load
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.errors import RouterError
from prefixwatch.router.serving.app import serve
from tests.router.fake_engine import FakeEngine


def config_for(*engines: FakeEngine, **fields: Any) -> RouterConfig:
    workers = [{"name": engine.name, "url": engine.url} for engine in engines]
    return RouterConfig.model_validate({"workers": workers, "port": 0, "policy": {"name": "round_robin"}, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": {"name": "round_robbin"}}, "unknown policy 'round_robbin': did you mean 'round_robin'?"),
        ({"policy": {"name": "cache_aware", "options": {"x": 1}}}, "has no option 'x'"),
        ({"policy": {"name": "cache_aware"}}, "set model_dir to the folder of the served model"),
        ({"model_dir": "/nowhere"}, "no tokenizer.json in /nowhere"),
    ],
)
async def test_what_is_wrong_with_a_configuration_is_said_in_one_line(
    engines: list[FakeEngine], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RouterError) as caught:
        await serve(config_for(*engines, **fields))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_policy_that_looks_at_caches_needs_a_view(engines: list[FakeEngine], model_dir: Path) -> None:
    config = config_for(
        *engines, policy={"name": "cache_aware"}, model_dir=str(model_dir), cache_view={"source": "none"}
    )
    with pytest.raises(RouterError, match=r"set cache_view\.source to 'events' or 'history'"):
        await serve(config)


async def test_a_port_in_use_is_named(engines: list[FakeEngine]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RouterError, match=rf"can't listen on 127.0.0.1:{port}: .*choose another port"):
            await serve(config_for(*engines, port=port))


async def test_the_address_of_an_ipv6_host_is_a_url(engines: list[FakeEngine]) -> None:
    addresses: asyncio.Queue[str] = asyncio.Queue()
    serving = asyncio.create_task(serve(config_for(*engines, host="::1"), ready=addresses.put_nowait))
    async with asyncio.timeout(60):
        address = await addresses.get()
    assert address.startswith("http://[::1]:")
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_engines_that_cannot_be_reached_are_named() -> None:
    engine = FakeEngine("a")
    await engine.start()
    await engine.stop()
    with pytest.raises(RouterError, match=rf"no engine is reachable \(a at {engine.url}: can't connect: "):
        await serve(config_for(engine, timeouts={"startup_seconds": 0}))


async def test_a_router_that_starts_before_its_engines_waits_for_them() -> None:
    engine = FakeEngine("a")
    await engine.start()
    engine.health = 503
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    health = {"down_interval_seconds": 0.01}
    serving = asyncio.ensure_future(serve(config_for(engine, health=health), ready=ready.set_result))
    await asyncio.sleep(0.05)
    assert not ready.done()
    engine.health = 200
    async with asyncio.timeout(60):
        assert (await ready).startswith("http://127.0.0.1:")
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    await engine.stop()


def test_a_wrong_file_names_every_wrong_field(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("prot: 1\nworkers: [{name: a, url: engine}]\n")
    with pytest.raises(DocumentError) as caught:
        load(file, RouterConfig)
    message = str(caught.value)
    assert f"{file}:2: workers[0].url: 'engine' is not an http" in message
    assert f"{file}:1: prot: unknown key: did you mean 'port'?" in message


def test_events_need_an_endpoint_for_every_worker() -> None:
    workers = [{"name": "a", "url": "http://e", "kv_events": "tcp://e:5557"}, {"name": "b", "url": "http://f"}]
    with pytest.raises(ValueError, match="b has no kv_events endpoint"):
        RouterConfig.model_validate({"workers": workers, "cache_view": {"source": "events"}})


async def test_the_module_runs_and_stops_on_its_own(engines: list[FakeEngine], tmp_path: Path) -> None:
    file = tmp_path / "router.json"
    workers = [{"name": engine.name, "url": engine.url} for engine in engines]
    file.write_text(json.dumps({"workers": workers, "port": 0, "policy": {"name": "round_robin"}}))
    command = [sys.executable, "-P", "-m", "prefixwatch.router.serving.app", "--config", str(file)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert (await process.stdout.readline()).startswith(b"router ready on http://127.0.0.1:")
    process.terminate()
    assert await process.wait() == 0


async def test_the_module_reports_trouble_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "prefixwatch.router.serving.app", "--config", str(tmp_path / "none.yaml")]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert stderr.decode().count("\n") == 1
    assert "none.yaml: can't be read: No such file" in stderr.decode()
