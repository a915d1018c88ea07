"""What all parts of a scenario file have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A map of keys in a scenario; a key that it doesn't know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
