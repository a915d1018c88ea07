"""Ctrl-C in a long command: the first one ends the work and keeps what was measured, the second one ends at once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

from rich.console import Console

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedError(Exception):
    """What was to be done had not begun when the user asked for an end."""


class Interrupt:
    """What the user asked for; `asked` stays true from the first signal on."""

    def __init__(self, console: Console) -> None:
        self.asked = False
        self._console = console
        self._keeps = False
        self._stop: Callable[[], None] | None = None

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """SIGINT and SIGTERM come here meanwhile; before there is anything to keep they cancel the calling task."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, task)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    @contextlib.contextmanager
    def ends(self, stop: Callable[[], None]) -> Iterator[None]:
        """From now on there is something to keep; until left, `stop` ends the work at hand early."""
        self._keeps, self._stop = True, stop
        try:
            if self.asked:
                stop()
            yield
        finally:
            self._stop = None

    def _on_signal(self, task: asyncio.Task[object]) -> None:
        if self.asked or not self._keeps:
            task.cancel()
            return
        self.asked = True
        self._console.print("Stopping; what was measured is kept and graded. Ctrl-C again ends at once.")
        if self._stop is not None:
            self._stop()
