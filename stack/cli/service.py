"""One part of the stack in this process, until SIGINT or SIGTERM: what containers run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any


def serve(service: Coroutine[Any, Any, None]) -> None:
    """Run until the service ends or a signal comes, on uvloop where the platform has it."""
    try:
        import uvloop
    except ImportError:
        factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_until_signalled(service))


async def _until_signalled(service: Coroutine[Any, Any, None]) -> None:
    serving = asyncio.create_task(service)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
