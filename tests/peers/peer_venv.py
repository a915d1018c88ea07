"""Where scripts/install-test-peers puts the routers that ours are compared with."""

from __future__ import annotations

from pathlib import Path

PYTHON = Path(__file__).parents[2] / ".peers/bin/python"
COMPLETE = Path(__file__).parents[2] / ".peers/requirements.lock"
"""Written last, so that it stands for a whole installation."""
