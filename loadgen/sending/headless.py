"""One headless run (`python -m prefixwatch.loadgen.run`): prepare the plan, send it through Locust, report progress."""

from __future__ import annotations

import gc
import json
import signal
import sys
from pathlib import Path
from typing import Any

import gevent
from locust.env import Environment

from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.sending.load_run import LoadRun, raise_file_limit
from prefixwatch.loadgen.sending.locust_user import PlanUser
from prefixwatch.loadgen.sending.processes import Led
from prefixwatch.loadgen.sending.run_config import load_run_config

PROGRESS_SECONDS = 1.0


def send_headless(config: Path) -> int:
    """The run of this configuration, to its end; the exit code. Expects the garbage collector off: turns it on."""
    raise_file_limit()
    try:
        settings = load_run_config(config)
        run = LoadRun.prepare(settings) if settings.in_one_process else Led(settings)
    except InputError as error:
        return _refused(error)
    gc.freeze()
    gc.enable()
    for number in (signal.SIGTERM, signal.SIGINT):
        gevent.signal_handler(number, run.stop)
    if isinstance(run, Led):
        return _lead(run)
    _send_through_locust(run)
    if PlanUser.write_failure:
        return 2
    _print_event("end", run.report())
    return 0


def _lead(run: Led) -> int:
    progress = gevent.spawn(_print_progress, run)
    try:
        report = run.send()
    except InputError as error:
        return _refused(error)
    except OSError as error:
        print(f"loadgen: can't write the log: {error.strerror or error}", file=sys.stderr)
        return 2
    finally:
        progress.kill()
    _print_event("end", report)
    return 0


def _refused(error: InputError) -> int:
    print(f"loadgen: {error}", file=sys.stderr)
    return 2


def _send_through_locust(run: LoadRun) -> None:
    PlanUser.load_run = run
    environment = Environment(user_classes=[PlanUser])
    runner = environment.create_local_runner()
    progress = gevent.spawn(_print_progress, run)
    runner.start(1, spawn_rate=1)
    run.finished.wait()
    progress.kill()
    runner.quit()


def _print_progress(run: LoadRun | Led) -> None:
    while True:
        gevent.sleep(PROGRESS_SECONDS)
        _print_event("progress", run.progress())


def _print_event(event: str, fields: dict[str, Any]) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)
