"""The base of all parts of a scenario file, and the limits and rules that they share."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict

LONGEST_TOKENS = 10_000_000
"""Of one text. No model reads more: a larger number is a mistake, and would fill the memory."""
MOST_ITEMS = 1_000_000
"""Groups, documents, examples or tools that a scenario may have, for the same reason."""
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")


class Section(BaseModel):
    """A map of keys in a scenario; a key that it doesn't know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def has_controls(text: str) -> bool:
    """Whether it has characters, such as a line break, that would end a header or be refused in one."""
    return _CONTROLS.search(text) is not None


def without_controls(text: str) -> str:
    """Control characters replaced by `%0A` and the like, so that different names stay different."""
    return _CONTROLS.sub(lambda found: f"%{ord(found[0]):02X}", text.strip())
