"""Series that no panel shows, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from prefixwatch.dashboards.queries.expressions import series_labels
from prefixwatch.documents import DocumentError, load

FILE = Path(__file__).parent / "not_shown.yaml"


class _Listed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    series: dict[str, str] = Field(description="series: why no panel shows it")


@cache
def not_shown(file: Path = FILE) -> Mapping[str, str]:
    """Reasons by series. Raises DocumentError, also for a series that doesn't exist."""
    listed = load(file, _Listed).series
    for name in listed:
        if name not in series_labels():
            raise DocumentError(f"{file}: series: nothing writes {name}: take it out")
    return listed
