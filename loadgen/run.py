"""`python -m loadgen.run --config FILE`: one run, headless, with a line of progress a second.

It goes through Locust's own environment and local runner, so whatever listens to Locust's events sees the same
requests as under `locust -f loadgen/locustfile.py`; it leaves out Locust's command line and web server.
Standard output has one JSON object a line: `{"event": "progress", …}` every second, then `{"event": "end", …}`
with the content of run.json. Exit code 0: the run was sent and written (run.json says whether it is valid);
2: the input was wrong. SIGTERM and SIGINT end the run early: everything is written, unsent requests included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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
_PRIORITY = -10


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadgen.run", description="Send one scenario to one target.")
    parser.add_argument("--config", type=Path, required=True, help="JSON file, see loadgen/run_config.py")
    options = parser.parse_args(arguments)
    raise_file_limit()
    _go_first()
    try:
        run = LoadRun.prepare(load_run_config(options.config))
    except INPUT_ERRORS as error:
        print(f"loadgen: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        gevent.signal_handler(number, run.stop)
    _send_through_locust(run)
    _print_event("end", run.report())
    return 0


def _go_first() -> None:
    """Ahead of all else here, where the system allows it: a late client spoils a run, a late server is measured."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)


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


if __name__ == "__main__":
    sys.exit(main())
