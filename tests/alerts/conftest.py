"""Says which promtools ran: a rule may be right in one version only."""

from __future__ import annotations

import pytest

from tests.alerts.promtools import promtools


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"promtool: {', '.join(promtools()) or 'none found'}")
