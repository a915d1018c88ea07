"""What all parts of a scenario file have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

LONGEST_TOKENS = 10_000_000
"""Of one text. No model reads more: beyond it a number has slipped, and would fill the memory."""
MOST_ITEMS = 1_000_000
"""Groups, documents, examples or tools that a scenario may have, for the same reason."""


class Section(BaseModel):
    """A map of keys in a scenario; a key that it doesn't know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
