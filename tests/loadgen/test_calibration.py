"""The client's own floor, found out in a process of its own as the load generator's is (gevent stays out of ours)."""

from __future__ import annotations

import json
import subprocess
import sys

_RUN = (
    "import json, time, dataclasses\n"
    "from prefixwatch.loadgen.sending import calibration\n"
    "{change}"
    "begun = time.monotonic(); found = calibration.calibrate()\n"
    "print(json.dumps(dataclasses.asdict(found) | {{'seconds': time.monotonic() - begun}}))\n"
)
# A client whose reads return 20 ms late: a machine in powersave, or one that is busy.
_SLOW = (
    "import gevent\n"
    "from prefixwatch.loadgen.client import http_client\n"
    "first = http_client.HttpClient.post\n"
    "def late(self, head, body, **more):\n"
    "    found = first(self, head, body, **more)\n"
    "    found.first_token += 0.02\n"
    "    return found\n"
    "http_client.HttpClient.post = late\n"
)


def calibrated(change: str = "") -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", _RUN.format(change=change)], capture_output=True, text=True, check=True, timeout=60
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def test_the_floor_is_small_and_quickly_found() -> None:
    found = calibrated()

    assert found["requests"] == 60
    assert 0 < found["floor_p50_ms"] <= found["floor_p99_ms"]
    assert found["floor_p50_ms"] < 20
    assert found["seconds"] < 30


def test_a_client_that_is_late_by_itself_shows_it_in_the_floor() -> None:
    """ai-dynamo/aiperf#1424 (LT10)."""
    assert calibrated(_SLOW)["floor_p50_ms"] >= 20
