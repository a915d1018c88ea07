"""Targets from files that something else writes, in Prometheus' file_sd format."""

from __future__ import annotations

import asyncio
import glob
import json
from pathlib import Path
from typing import Any

from prefixwatch.documents import DocumentError, parse_plain
from prefixwatch.exporters.discovery.config import FileSdConfig
from prefixwatch.exporters.discovery.provider import DiscoveryError, Found, label_sets
from prefixwatch.exporters.discovery.relabel import Labels
from prefixwatch.exporters.http.credentials import Stamp, stamp


class FileDiscovery:
    """Reads the files again when one of them changes, comes or goes."""

    name = "file_sd"

    def __init__(self, config: FileSdConfig) -> None:
        self._config = config
        self._last_good: dict[Path, list[Labels]] = {}
        self._seen: dict[Path, Stamp | None] = {}

    async def fetch(self) -> Found:
        return await asyncio.to_thread(self._fetch)

    async def changed(self) -> None:
        while True:
            await asyncio.sleep(self._config.refresh_interval)
            if await asyncio.to_thread(self._stamps) != self._seen:
                return

    async def close(self) -> None:
        """Files are not kept open."""

    def _fetch(self) -> Found:
        self._seen = self._stamps()
        good: dict[Path, list[Labels]] = {}
        problems = []
        for path in self._seen:
            try:
                good[path] = label_sets(_read(path), str(path), {"__meta_filepath": str(path)})
            except DiscoveryError as error:
                problems.append(str(error))
                good[path] = self._last_good.get(path, [])
        self._last_good = good
        if not self._seen:
            problems.append(f"file_sd: no file matches {', '.join(self._config.files)}")
        return Found([labels for targets in good.values() for labels in targets], tuple(problems))

    def _stamps(self) -> dict[Path, Stamp | None]:
        paths = {Path(found) for pattern in self._config.files for found in glob.glob(pattern)}
        return {path: stamp(path) for path in sorted(paths)}


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else parse_plain(text, name=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise DiscoveryError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from error
    except json.JSONDecodeError as error:
        raise DiscoveryError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error
    except DocumentError as error:
        raise DiscoveryError(str(error)) from error
