"""What Locust loads: `locust -f loadgen/locustfile.py --host URL --model-dir DIR`, with its web page or --headless."""

from __future__ import annotations

import sys
from pathlib import Path

# Locust puts this file's folder first on the import path while it loads it; names in here, such as
# `statistics`, would hide the standard library's from whatever is imported now.
_path = sys.path[:]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

from prefixwatch.loadgen.sending.locust_user import PlanUser  # noqa: E402, the path must be right before this import

sys.path[:] = _path

__all__ = ["PlanUser"]
