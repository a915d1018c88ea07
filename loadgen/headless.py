"""What `python -m loadgen.run` does once its imports are paid for: prepare, send through Locust, tell of it."""

from __future__ import annotations

import gc
import json
import signal
import sys
from pathlib import Path
from typing import Any

import gevent
from locust.env import Environment

from loadgen.load_run import LoadRun, raise_file_limit
from loadgen.locust_user import INPUT_ERRORS, PlanUser
from loadgen.run_config import load_run_config

PROGRESS_SECONDS = 1.0


def send_headless(config: Path) -> int:
    """The run of this configuration, to its end; the exit code. Expects the garbage collector off: turns it on."""
    raise_file_limit()
    try:
        run = LoadRun.prepare(load_run_config(config))
    except INPUT_ERRORS as error:
        print(f"loadgen: {error}", file=sys.stderr)
        return 2
    gc.freeze()
    gc.enable()
    for number in (signal.SIGTERM, signal.SIGINT):
        gevent.signal_handler(number, run.stop)
    _send_through_locust(run)
    if PlanUser.write_failure:
        return 2
    _print_event("end", run.report())
    return 0


def _send_through_locust(run: LoadRun) -> None:
    PlanUser.load_run = run
    environment = Environment(user_classes=[PlanUser])
    runner = environment.create_local_runner()
    progress = gevent.spawn(_print_progress, run)
    runner.start(1, spawn_rate=1)
    run.finished.wait()
    progress.kill()
    runner.quit()


def _print_progress(run: LoadRun) -> None:
    while True:
        gevent.sleep(PROGRESS_SECONDS)
        _print_event("progress", run.progress())


def _print_event(event: str, fields: dict[str, Any]) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)
