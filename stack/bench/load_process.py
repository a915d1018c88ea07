"""The load generator as a process of its own: gevent stays out of this one, and its stamps free of our work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefixwatch.engines.process import guarded
from prefixwatch.loadgen.sending.run_config import RunConfig
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.interrupt import Interrupt, StoppedError

_STOP_SECONDS = 10.0


async def send_load(
    config: RunConfig,
    folder: Path,
    on_progress: Callable[[dict[str, Any]], None],
    *,
    interrupt: Interrupt,
    ca_file: Path | None = None,
) -> dict[str, Any]:
    """Send one run and answer its `run.json`; `folder` gets the run's configuration, log and request log.

    An interrupt ends the run early: its log is whole, and says so. `ca_file` has the certificates that a target's is
    checked with. Raises UsageError with the load generator's own message, StoppedError if it had not begun to send.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config_file = folder / "load.json"
    config_file.write_text(config.model_dump_json(indent=1) + "\n", encoding="utf-8")
    with (folder / "load.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "prefixwatch.loadgen.run",
            "--config",
            str(config_file),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            limit=2**20,
            start_new_session=True,  # a group of its own, for the guardian
            env=None if ca_file is None else {**os.environ, "SSL_CERT_FILE": str(ca_file)},
        )
        try:
            with guarded(process.pid), interrupt.ends(lambda: _terminate(process)):
                report = await _follow(process, on_progress)
        finally:
            await _ensure_ended(process)
    if report is None and interrupt.asked:
        raise StoppedError
    if process.returncode or report is None:
        said = (folder / "load.log").read_text(errors="replace").strip()
        raise UsageError(f"the load generator ended with code {process.returncode}: {said or 'it said nothing'}")
    return report


async def _follow(
    process: asyncio.subprocess.Process, on_progress: Callable[[dict[str, Any]], None]
) -> dict[str, Any] | None:
    assert process.stdout is not None
    report = None
    async for line in process.stdout:
        event: dict[str, Any] = json.loads(line)
        if event.pop("event") == "end":
            report = event
        else:
            on_progress(event)
    await process.wait()
    return report


def _terminate(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


async def _ensure_ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    _terminate(process)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
    if process.returncode is None:
        process.kill()
        await process.wait()
