"""`python -m prefixwatch.loadgen.run --config FILE`: one run, headless, with a line of progress a second.

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
import functools
import gc
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PRIORITY = -10


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="prefixwatch.loadgen.run", description="Send one scenario to one target.")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--config", type=Path, help="JSON file, see loadgen/sending/run_config.py")
    given.add_argument("--worker", metavar="HOST:PORT", help="send a part of the run that this process leads")
    options = parser.parse_args(arguments)
    _go_first()
    # Imports and a plan leave no garbage, and the collector would take a fifth of the time to the first request.
    gc.disable()
    sys.meta_path.insert(0, _WithoutPandas)
    if options.worker is not None:
        with _installed_packages_read_once():
            from prefixwatch.loadgen.sending.processes import work_for  # noqa: PLC0415

        gc.enable()
        work_for(options.worker)
        return 0
    with _installed_packages_read_once():
        from prefixwatch.loadgen.sending.headless import send_headless  # noqa: PLC0415

    return send_headless(options.config)


def _go_first() -> None:
    """Ahead of all else here, where the system allows it: a late client spoils a run, a late server is measured."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)


class _WithoutPandas:
    """pyarrow imports pandas, where there is one, to see that a list isn't a Series: 50 MB to write the request log."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("the load generator does without pandas", name=name)


@contextlib.contextmanager
def _installed_packages_read_once() -> Iterator[None]:
    """gevent asks 25 times for listeners to its patches, and each time Python reads every installed package's files:
    with a hundred of them a fourth of the time to the first request."""
    original = importlib.metadata.entry_points
    every = functools.cache(original)

    def select(**wanted: Any) -> Any:
        return every().select(**wanted)

    importlib.metadata.entry_points = select
    try:
        yield
    finally:
        importlib.metadata.entry_points = original


if __name__ == "__main__":
    sys.exit(main())
