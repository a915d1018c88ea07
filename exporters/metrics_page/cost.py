"""What the exporter itself is, and what its metrics page costs: one more source."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from prometheus_client.core import Metric

from prefixwatch.exporters.metrics_page.rows import rows


def own_version() -> str:
    """The installed version of prefixwatch; empty in a checkout that isn't installed."""
    try:
        return version("prefixwatch")
    except PackageNotFoundError:
        return ""


class PageCost:
    """CPU time and size of the metrics pages that were written so far. Read by the next page."""

    name = "page"

    def __init__(self) -> None:
        self.pages = 0
        self.cpu_seconds = 0.0
        self.bytes: int | None = None
        """Of the last page, before compression."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the CPU time of a piece of work on a page; nothing else runs in this thread meanwhile."""
        begun = time.thread_time()
        try:
            yield
        finally:
            self.cpu_seconds += time.thread_time() - begun

    def written(self, size_bytes: int) -> None:
        self.pages += 1
        self.bytes = size_bytes

    def metrics(self, now_seconds: float) -> Iterable[Metric]:
        return [
            rows("build_info", [([own_version(), platform.python_version()], 1.0)]),
            rows("pages", [([], self.pages)]),
            rows("page_cpu_seconds", [([], self.cpu_seconds)]),
            rows("page_bytes", [([], self.bytes)]),
        ]

    def document(self, now_seconds: float) -> Mapping[str, Any]:
        return {"version": own_version(), "pages": self.pages, "page_cpu_seconds": self.cpu_seconds}
