"""What may stand in a header: a tenant's or session's name comes from a file and may be anything."""

from __future__ import annotations

import re

_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")


def has_controls(text: str) -> bool:
    """Whether it has characters, such as a line break, that would end a header or be refused in one."""
    return _CONTROLS.search(text) is not None


def without_controls(text: str) -> str:
    """With `%0A` and the like in their place, so that different names stay different."""
    return _CONTROLS.sub(lambda found: f"%{ord(found[0]):02X}", text.strip())
