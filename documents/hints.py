"""The remedy for a mistyped name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST_LISTED = 40


def did_you_mean(given: object, known: Iterable[str], otherwise: str | None = None) -> str:
    """`did you mean 'x'?` for the known name that is closest to `given`; `otherwise`, or all of them, if none is close.

    A name that begins with `given` counts as closest: `rate` means `rate_per_second`, not `format`.
    """
    names = list(known)
    text = str(given)[:100].lower()
    lower = {name.lower(): name for name in names}
    begins = [name for name in lower if text and name.startswith(text)]
    close = [*begins, *difflib.get_close_matches(text, lower, n=1)]
    if close:
        return f"did you mean '{lower[close[0]]}'?"
    listed = ", ".join(names[:_MOST_LISTED]) + (", …" if len(names) > _MOST_LISTED else "")
    return otherwise or (f"use one of {listed}" if names else "there are none")
