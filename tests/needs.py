"""What a test may be skipped for want of, and where it then fails instead."""

from __future__ import annotations

import os

import pytest


def need(there: bool, reason: str, variable: str = "CI") -> None:
    """Skip the test for want of something that the machine should have; with this environment variable set, fail it."""
    if not there and os.environ.get(variable):
        pytest.fail(reason)
    elif not there:
        pytest.skip(reason)
