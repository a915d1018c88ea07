"""Where scripts/install-test-peers puts the routers that ours are compared with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PYTHON = Path(__file__).parents[2] / ".peers/bin/python"
COMPLETE = Path(__file__).parents[2] / ".peers/requirements.lock"
"""Written last, so that it stands for a whole installation."""


def need(there: bool, reason: str) -> None:
    """Skip the test, or in CI fail it, for want of something that the machine should have."""
    if not there and os.environ.get("CI"):
        pytest.fail(reason)
    elif not there:
        pytest.skip(reason)
