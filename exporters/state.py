"""What survives a restart of the exporter: how far each router's records were read, and what they were counted to.

Both are of the same moment, so records that end while the exporter is away are read afterwards, none twice, and the
counters of requests continue instead of starting again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

import msgspec

from prefixwatch.exporters.requests.ledger import LedgerState, RequestLedger
from prefixwatch.exporters.requests.router_records import ReaderState, RouterRecords

_log = logging.getLogger("prefixwatch.exporter")

_SCHEMA = 1
_EVERY_SECONDS = 5.0
_OLDEST_SECONDS = 3600.0
"""A router's log has long gone on by then, and counters that begin again are what everybody expects."""


class _State(msgspec.Struct):
    schema: int
    saved_unix_seconds: float
    readers: dict[str, ReaderState]
    ledger: LedgerState


class StateFile:
    """Saves the state every 5 seconds and at the end; a state older than an hour is not used."""

    def __init__(self, path: Path, records: RouterRecords, ledger: RequestLedger) -> None:
        self._path = path
        self._records = records
        self._ledger = ledger
        self._task: asyncio.Task[None] | None = None

    def load(self) -> bool:
        """Continue from the file; False, with a line in the log, where it can't be used."""
        try:
            state = msgspec.json.decode(self._path.read_bytes(), type=_State)
        except FileNotFoundError:
            return False
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning(
                "state can't be read: counting starts at 0", extra={"file": str(self._path), "why": str(error)}
            )
            return False
        age = time.time() - state.saved_unix_seconds
        if state.schema != _SCHEMA or not 0 <= age <= _OLDEST_SECONDS:
            _log.warning("state is not used: counting starts at 0", extra={"file": str(self._path), "age_seconds": age})
            return False
        self._records.restore(state.readers, state.saved_unix_seconds)
        self._ledger.restore(state.ledger)
        _log.info("state continued", extra={"file": str(self._path), "age_seconds": round(age, 1)})
        return True

    def start(self) -> None:
        """Save from now on; needs a running event loop."""
        self._task = asyncio.create_task(self._keep_saving(), name="state")

    async def stop(self) -> None:
        """Save once more, and end."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._save()

    async def _keep_saving(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            await self._save()

    async def _save(self) -> None:
        state = _State(_SCHEMA, time.time(), self._records.state(), self._ledger.state())
        body = msgspec.json.encode(state)
        try:
            await asyncio.to_thread(_replace, self._path, body)
        except OSError as error:
            _log.warning("state can't be saved", extra={"file": str(self._path), "why": error.strerror or str(error)})


def _replace(path: Path, body: bytes) -> None:
    """All of the file or nothing, for its owner only: labels hold tenants' names."""
    new = path.with_name(f"{path.name}.new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
