"""Run the live router: an OpenAI-compatible server in front of the engines.

python -m prefixwatch.router.serving.app --config router.yaml
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from aiohttp import web

from prefixwatch.documents import DocumentError, load
from prefixwatch.documents.addresses import host_port
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer, TokenizerError
from prefixwatch.router.config import RouterConfig
from prefixwatch.router.errors import RouterError
from prefixwatch.router.policies import make_policy
from prefixwatch.router.serving.create import ROUTER, create_app

if TYPE_CHECKING:
    pass

try:
    import uvloop

    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
except ImportError:  # not on Windows
    new_event_loop = asyncio.new_event_loop


_OPEN_FILES = 65_536


async def serve(config: RouterConfig, *, ready: Callable[[str], None] = lambda address: None) -> None:
    """Run the router until cancelled; `ready` is called with its address once it takes requests.

    Raises RouterError, with one message that says what to do, when it can't start.
    """
    try:
        policy = make_policy(config.policy.name, seed=config.policy.seed, options=config.policy.options)
        tokenizer = Tokenizer(config.model_dir) if config.model_dir is not None else None
    except (ValueError, TokenizerError) as error:
        raise RouterError(str(error)) from error
    app = create_app(config, policy=policy, tokenizer=tokenizer)
    _raise_file_limit()
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            raise RouterError(
                f"can't listen on {config.host}:{config.port}: {error.strerror}; "
                "stop what runs there or choose another port (0 picks a free one)"
            ) from error
        await app[ROUTER].wait_for_workers()  # until then /health and requests answer 503
        gc.collect()
        gc.freeze()  # what was imported stays for good; walking it again would stop every stream for tens of ms
        ready(_address(runner, config))
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m prefixwatch.router.serving.app", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML or JSON file, see router/config.py")
    arguments = parser.parse_args()
    try:
        config = load(arguments.config, RouterConfig)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_until_signalled(config))
    except (DocumentError, RouterError) as error:
        print(f"router: {error}", file=sys.stderr)
        return 2
    return 0


def _leave(code: int) -> NoReturn:
    """End the process, even while a thread still tokenises a prompt: nobody waits for that any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    if any(thread is not threading.current_thread() and not thread.daemon for thread in threading.enumerate()):
        os._exit(code)
    sys.exit(code)


async def _until_signalled(config: RouterConfig) -> None:
    serving = asyncio.create_task(
        serve(config, ready=lambda address: print(f"router ready on {address}", flush=True))
    )  # fmt: skip
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def _raise_file_limit() -> None:
    """Each stream takes two sockets; the usual soft limits (256 on macOS, 1,024) would cap the fleet."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _address(runner: web.AppRunner, config: RouterConfig) -> str:
    port = runner.addresses[0][1] if runner.addresses else config.port
    return f"http://{host_port(config.host, port)}"


if __name__ == "__main__":
    _leave(main())
