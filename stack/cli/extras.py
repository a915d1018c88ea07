"""Which extra brings a module that isn't installed."""

from __future__ import annotations

EXTRA_OF = {
    "blake3": "router",
    "gevent": "bench",
    "kubernetes": "kubernetes",
    "locust": "bench",
    "opentelemetry.exporter": "router",
    "opentelemetry.sdk": "router",
    "pandas": "bench",
    "platformdirs": "router",
    "plotly": "bench",
    "psutil": "router",
    "pyarrow": "bench",
    "ray": "ray",
    "tokenizers": "router",
    "uhashring": "router",
}
"""Module → extra of pyproject.toml."""


def remedy(missing: ModuleNotFoundError) -> str | None:
    """What to install for a module that isn't there; None if it belongs to no extra."""
    name = missing.name or ""
    for module, extra in EXTRA_OF.items():
        if name == module or name.startswith(f"{module}."):
            return f"this command needs {module}, which isn't installed: run pip install 'prefixwatch[{extra}]'"
    return None
