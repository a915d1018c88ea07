"""`python -m loadgen.run --config FILE`: one run, headless, with a line of progress a second.

It goes through Locust's own environment and local runner, so whatever listens to Locust's events sees the same
requests as under `locust -f loadgen/locustfile.py`; it leaves out Locust's command line and web server.
Standard output has one JSON object a line: `{"event": "progress", …}` every second, then `{"event": "end", …}`
with the content of run.json. Exit code 0: the run was sent and written (run.json says whether it is valid);
2: the input was wrong, or the log couldn't be written. SIGTERM and SIGINT end the run early: everything is written,
unsent requests included.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
from pathlib import Path

_PRIORITY = -10


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadgen.run", description="Send one scenario to one target.")
    parser.add_argument("--config", type=Path, required=True, help="JSON file, see loadgen/run_config.py")
    options = parser.parse_args(arguments)
    _go_first()
    # Imports and a plan leave no garbage, and the collector would take a fifth of the time to the first request.
    gc.disable()
    from loadgen.headless import send_headless  # noqa: PLC0415

    return send_headless(options.config)


def _go_first() -> None:
    """Ahead of all else here, where the system allows it: a late client spoils a run, a late server is measured."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)


if __name__ == "__main__":
    sys.exit(main())
