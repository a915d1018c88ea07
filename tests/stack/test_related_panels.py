"""What a runbook calls a related panel is one, under that title."""

from __future__ import annotations

import re

import pytest

from prefixwatch.alerts.catalogue.model import load_catalogue
from prefixwatch.dashboards.definition import shipped
from prefixwatch.runbooks.page import shipped_runbooks

TITLES = {f"{dashboard.title} › {panel.title}" for dashboard in shipped().values() for panel in dashboard.panels}


@pytest.mark.parametrize("alert", [alert.name for alert in load_catalogue().alerts])
def test_related_panels_exist(alert: str) -> None:
    section = shipped_runbooks().pages[alert].sections["Related panels"]

    named = re.findall(r"^- (.+)$", section, flags=re.M)

    assert named
    assert set(named) <= TITLES
