"""A fleet of engines with a router in front, as processes: what `bench` and `up` both run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from prefixwatch.engines import fleet
from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.engines.process import ManagedProcess
from prefixwatch.engines.tiny_model import default_model_dir
from prefixwatch.loadgen.scenario.fleet_section import Workers
from prefixwatch.router.config import RouterConfig, WorkerConfig
from prefixwatch.stack.errors import UsageError

_ROUTER_START_SECONDS = 60.0
ENGINES = ("simulated", "vllm")


async def start_engines(
    kind: str,
    count: int,
    log_dir: Path,
    model_dir: Path | None,
    options: Mapping[str, Any],
    kinds: Sequence[Workers] = (),
) -> list[EngineHandle]:
    """Start `count` engines of a kind; options that are None keep the engine's own default.

    `kinds` say where the first ones differ. Raises UsageError for an unknown kind, EngineError when one doesn't start.
    """
    folder = model_dir or default_model_dir()
    given = {key: value for key, value in options.items() if value is not None}
    if any(own.role for own in kinds):
        raise UsageError("fleet: role: only `prefixwatch simulate` splits a fleet: leave it out")
    if kind == "vllm" and any(own.kind for own in kinds):
        raise UsageError("fleet: kind: only simulated engines imitate another system: leave it out")
    if kind == "vllm" and any(own.profile for own in kinds):
        raise UsageError("fleet: profile: vLLM engines are as fast as this machine: leave it out")
    different = [
        {key: value for key in ("profile", "capacity_blocks", "kind") if (value := getattr(own, key)) is not None}
        for own in kinds
        for _ in range(own.count)
    ]
    if kind == "simulated":
        return await fleet.start_simulated(count, folder, log_dir, different, **given)
    if kind == "vllm":
        given.pop("profile", None)
        return await fleet.start_vllm(count, folder, log_dir, different, **given)
    raise UsageError(f"no engine '{kind}': choose one of {', '.join(ENGINES)}")


def as_workers(handles: Sequence[EngineHandle], kinds: Sequence[Workers] = ()) -> list[WorkerConfig]:
    """The engines as the router's configuration names them; `kinds` say where the first ones are."""
    places = [own for own in kinds for _ in range(own.count)]
    places += [Workers()] * (len(handles) - len(places))
    return [
        WorkerConfig(
            name=handle.name,
            url=handle.url,
            kv_events=(handle.kv_events.publish,),
            kv_replay=(handle.kv_events.replay,),
            region=place.region,
            zone=place.zone,
            gpu_group=place.gpu_group,
            node=place.node,
            cluster=place.region,
        )
        for handle, place in zip(handles, places, strict=True)
    ]


def write_with_secrets(file: Path, values: Mapping[str, Any]) -> None:
    """A configuration for a child process, secrets included, that only this user can read."""

    def plain(value: object) -> str:
        return value.get_secret_value() if isinstance(value, SecretStr) else str(value)

    file.touch(mode=0o600)
    file.write_text(json.dumps(values, default=plain, indent=1) + "\n", encoding="utf-8")


async def start_router(config: RouterConfig, folder: Path) -> ManagedProcess:
    """Start a router process and wait until it serves. Raises ProcessFailed naming its log."""
    folder.mkdir(parents=True, exist_ok=True)
    config_file = folder / "router.json"
    write_with_secrets(config_file, config.model_dump())
    command = [sys.executable, "-P", "-m", "prefixwatch.router.serving.app", "--config", str(config_file)]
    process = ManagedProcess("router", command, folder / "router.log")
    try:
        await process.wait_ready(f"http://{config.host}:{config.port}/health", _ROUTER_START_SECONDS)
    except BaseException:
        process.stop()
        raise
    return process
