"""Several engines of one kind on this machine: started together, stopped together, all or none."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import aiohttp
from pydantic import ValidationError

from prefixwatch.engines.errors import EngineError
from prefixwatch.engines.process import ManagedProcess, free_ports, stop_all
from prefixwatch.engines.simulated.config import SimulatedEngineConfig
from prefixwatch.engines.vllm import install as vllm_cpu
from prefixwatch.engines.vllm import server as vllm_server
from prefixwatch.engines.vllm.server import KvEventEndpoints, VllmOptions

EngineKind = Literal["vllm", "simulated"]

_BEHIND_THE_CLIENT = ("nice", "-n", "10")
"""An engine on the CPU takes all of it; what measures it on the same machine must not queue behind it."""
_START_SECONDS: dict[EngineKind, float] = {"vllm": 300.0, "simulated": 30.0}
_RESET_SECONDS = 10.0
_SOCKET_PATH_BYTES = 100  # the system's limit for a socket's path is 104 on macOS, 108 on Linux


@dataclass(frozen=True, slots=True)
class EngineHandle:
    """One running engine: where it answers, and how its KV events are read."""

    name: str
    kind: EngineKind
    url: str
    model: str
    block_size: int
    kv_events: KvEventEndpoints
    process: ManagedProcess

    @property
    def kv_events_endpoint(self) -> str:
        return self.kv_events.publish

    @property
    def replay_endpoint(self) -> str:
        return self.kv_events.replay


async def start_vllm(
    count: int, model_dir: Path, log_dir: Path, each: Sequence[Mapping[str, Any]] = (), **options: Any
) -> list[EngineHandle]:
    """Starts vLLM engines (fields of VllmOptions as keywords) and waits until all are ready: tens of seconds.

    `each` has further options of the first engine, the second, …
    Raises EngineError if vLLM isn't installed, an option doesn't fit, or an engine fails; none is left then.
    """
    own_settings = [_vllm_options({**options, **own}) for own in _of_each(each, count)]
    python = vllm_cpu.require().python
    environment = vllm_server.environment(os.environ)

    def launch(name: str, port: int, events: KvEventEndpoints) -> EngineHandle:
        settings = own_settings[_number(name)]
        command = vllm_server.command(python, model_dir, name, port=port, events=events, options=settings)
        process = ManagedProcess(name, [*_BEHIND_THE_CLIENT, *command], log_dir / f"{name}.log", environment)
        url = f"http://127.0.0.1:{port}"
        return EngineHandle(name, "vllm", url, settings.served_model_name, settings.block_size, events, process)

    return await _start(count, "vllm", launch)


async def start_simulated(
    count: int, model_dir: Path, log_dir: Path, each: Sequence[Mapping[str, Any]] = (), **options: Any
) -> list[EngineHandle]:
    """Starts simulated engines (fields of SimulatedEngineConfig as keywords) and waits until all are ready.

    `each` has further options of the first engine, the second, …
    Each one's configuration is left beside its log. Raises EngineError if an option doesn't fit or an engine
    fails; none is left then.
    """

    def launch(name: str, port: int, events: KvEventEndpoints) -> EngineHandle:
        own = {
            "model_dir": model_dir,
            "port": port,
            "kv_events_endpoint": events.publish,
            "replay_endpoint": events.replay,
            "kv_events_topic": f"kv@{name}",
        }
        config = _simulated_config({**options, **_of_each(each, count)[_number(name)], **own})
        log_dir.mkdir(parents=True, exist_ok=True)
        config_file = log_dir / f"{name}.json"
        config_file.write_text(config.model_dump_json(indent=1) + "\n")
        command = [sys.executable, "-P", "-m", "prefixwatch.engines.simulated.server", "--config", str(config_file)]
        process = ManagedProcess(name, command, log_dir / f"{name}.log")
        url = f"http://127.0.0.1:{port}"
        return EngineHandle(name, "simulated", url, config.served_model_name, config.block_size, events, process)

    return await _start(count, "simulated", launch)


def _of_each(each: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    return [*each, *({} for _ in range(count - len(each)))]


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


async def restart(handle: EngineHandle) -> EngineHandle:
    """Kills the engine if it still runs, starts it again on the same port and event endpoints, waits until it is ready.

    Raises EngineError if it fails; it is stopped then.
    """
    reborn = replace(handle, process=await asyncio.to_thread(handle.process.again))
    try:
        await _ready(reborn)
    except BaseException:
        await stop([reborn])
        raise
    return reborn


async def stop(handles: Sequence[EngineHandle]) -> None:
    """Stops them all at once; ones already gone are no error."""
    await asyncio.to_thread(stop_all, [handle.process for handle in handles])


async def reset_caches(handles: Sequence[EngineHandle]) -> None:
    """Empties every engine's prefix cache. Raises EngineError if one refuses, as engines do while they serve."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_RESET_SECONDS)) as session:
        await asyncio.gather(*(_reset_cache(session, handle) for handle in handles))


async def _start(
    count: int, kind: EngineKind, launch: Callable[[str, int, KvEventEndpoints], EngineHandle]
) -> list[EngineHandle]:
    """Launches `count` engines and waits for all of them; if that fails or is cancelled, stops them all."""
    if count < 1:
        raise EngineError(f"a fleet needs at least 1 engine, not {count}")
    handles: list[EngineHandle] = []
    try:
        for number, port in enumerate(free_ports(count)):
            name = f"{kind}-{number}"
            handles.append(launch(name, port, _ipc_endpoints(name)))
        async with asyncio.TaskGroup() as group:
            for handle in handles:
                group.create_task(_ready(handle))
    except BaseException as error:
        await stop(handles)
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from None  # the engine that failed first; the rest were cancelled for it
        raise
    return handles


async def _ready(handle: EngineHandle) -> None:
    await handle.process.wait_ready(f"{handle.url}/health", _START_SECONDS[handle.kind])


def _vllm_options(options: Mapping[str, Any]) -> VllmOptions:
    known = [field.name for field in fields(VllmOptions)]
    if unknown := sorted(options.keys() - set(known)):
        raise EngineError(f"vLLM engines have no option {', '.join(unknown)}; there are {', '.join(known)}")
    return VllmOptions(**options)


def _simulated_config(settings: Mapping[str, Any]) -> SimulatedEngineConfig:
    try:
        return SimulatedEngineConfig.model_validate(settings)
    except ValidationError as error:
        problems = "; ".join(_problem(each["loc"], each["msg"]) for each in error.errors())
        raise EngineError(f"the simulated engine can't be configured so: {problems}") from error


def _problem(path: Sequence[int | str], message: str) -> str:
    """Of one key, or of several that don't go together, which have no path."""
    what = message.removeprefix("Value error, ")
    return f"{'.'.join(map(str, path))}: {what}" if path else what


_ipc_numbers = itertools.count()


@functools.cache
def _socket_dir() -> tempfile.TemporaryDirectory[str]:
    """A private folder for sockets, removed when this interpreter ends."""
    return tempfile.TemporaryDirectory(prefix="prefixwatch-")


def _ipc_endpoints(name: str) -> KvEventEndpoints:
    """Fresh socket paths; vLLM binds its end only for such and for wildcard TCP, which others could reach."""
    stem = Path(_socket_dir().name) / f"{name}.{next(_ipc_numbers)}"
    if len(os.fsencode(f"{stem}.replay")) > _SOCKET_PATH_BYTES:
        raise EngineError(f"{stem.parent} is too long a path for sockets: set TMPDIR to a shorter one")
    return KvEventEndpoints(f"ipc://{stem}.kv", f"ipc://{stem}.replay")


async def _reset_cache(session: aiohttp.ClientSession, handle: EngineHandle) -> None:
    deadline = time.monotonic() + _RESET_SECONDS
    problem = ""
    while not problem or time.monotonic() < deadline:
        try:
            async with session.post(f"{handle.url}/reset_prefix_cache") as response:
                if response.status == 200 and _succeeded(await response.read()):
                    return
                problem = f"HTTP {response.status}" if response.status != 200 else "requests still hold blocks"
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"{handle.name} can't empty its prefix cache: {handle.process.describe()}") from error
        await asyncio.sleep(0.1)
    raise EngineError(f"{handle.name} can't empty its prefix cache: {problem}")


def _succeeded(body: bytes) -> bool:
    """vLLM says `{"success": false}` inside a 200 while blocks are held; older ones answer with an empty body."""
    return not body or json.loads(body).get("success", True) is not False
