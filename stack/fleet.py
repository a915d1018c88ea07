"""A fleet of engines with a router in front, as processes: what `bench` and `up` both run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines import fleet
from engines.fleet import EngineHandle
from engines.process import ManagedProcess
from engines.tiny_model import default_model_dir
from router.config import RouterConfig, WorkerConfig
from stack.errors import UsageError

_ROUTER_START_SECONDS = 60.0
ENGINES = ("simulated", "vllm")


async def start_engines(
    kind: str, count: int, log_dir: Path, model_dir: Path | None, options: Mapping[str, Any]
) -> list[EngineHandle]:
    """Start `count` engines of a kind; options that are None keep the engine's own default.

    Raises UsageError for an unknown kind, EngineError when one doesn't start.
    """
    folder = model_dir or default_model_dir()
    given = {key: value for key, value in options.items() if value is not None}
    if kind == "simulated":
        return await fleet.start_simulated(count, folder, log_dir, **given)
    if kind == "vllm":
        given.pop("profile", None)
        return await fleet.start_vllm(count, folder, log_dir, **given)
    raise UsageError(f"no engine '{kind}': choose one of {', '.join(ENGINES)}")


def as_workers(handles: Sequence[EngineHandle]) -> list[WorkerConfig]:
    """The engines as the router's configuration names them."""
    return [
        WorkerConfig(
            name=handle.name,
            url=handle.url,
            kv_events=handle.kv_events.publish,
            kv_replay=handle.kv_events.replay,
        )
        for handle in handles
    ]


async def start_router(config: RouterConfig, folder: Path) -> ManagedProcess:
    """Start a router process and wait until it serves. Raises ProcessFailed naming its log."""
    folder.mkdir(parents=True, exist_ok=True)
    config_file = folder / "router.json"
    config_file.write_text(config.model_dump_json(indent=1) + "\n", encoding="utf-8")
    config_file.chmod(0o600)  # it holds the tenants' salts
    command = [sys.executable, "-m", "router.app", "--config", str(config_file)]
    process = ManagedProcess("router", command, folder / "router.log")
    try:
        await process.wait_ready(f"http://{config.host}:{config.port}/health", _ROUTER_START_SECONDS)
    except BaseException:
        process.stop()
        raise
    return process
