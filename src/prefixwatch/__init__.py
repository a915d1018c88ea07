"""prefixwatch: observability, SLOs and a benchmark harness for LLM serving fleets that reuse prefix KV caches.

`read_run`, `grade`, `compare`, `load_slos` and `build_rules` are the Python API (docs/api.md). Importing this package
loads nothing else: each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefixwatch.alerts.build import build as build_rules
    from prefixwatch.loadgen.results.api import compare, grade, read_run
    from prefixwatch.slo.build import load_slos

    __version__: str

__all__ = ["__version__", "build_rules", "compare", "grade", "load_slos", "read_run"]

_PLACES = {
    "build_rules": ("prefixwatch.alerts.build", "build"),
    "compare": ("prefixwatch.loadgen.results.api", "compare"),
    "grade": ("prefixwatch.loadgen.results.api", "grade"),
    "load_slos": ("prefixwatch.slo.build", "load_slos"),
    "read_run": ("prefixwatch.loadgen.results.api", "read_run"),
}


def __getattr__(name: str) -> Any:
    """The API's names, and `__version__`: importlib.metadata takes half the time of `--help`."""
    if name == "__version__":
        from importlib.metadata import version

        return version("prefixwatch")
    if name in _PLACES:
        from importlib import import_module

        module, attribute = _PLACES[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'prefixwatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
