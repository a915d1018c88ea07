"""Dashboards drawn with Grafana's own React components, to be looked at and to fail where a panel shows nothing.

Python asks a Prometheus and lays out what it said as Grafana's data source does; the page (`src/`, built by vite) draws
it. It is Grafana's component library and not Grafana: see docs/dashboards.md for what that leaves out.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
BUILT = FOLDER / "dist"
"""The page, as vite built it."""
