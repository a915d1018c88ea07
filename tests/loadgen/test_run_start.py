from __future__ import annotations

import subprocess
import sys

SLOW = ("numba", "pyarrow", "plotly")


def test_a_run_starts_without_what_only_its_end_needs() -> None:
    """Each of these takes a tenth of a second or more to import, before the first request can be sent."""
    script = (
        f"import sys, prefixwatch.loadgen.sending.headless; print([name for name in {SLOW!r} if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
