"""Ends process groups whose owner died without doing so itself: run as a script, standard library only.

The owner writes `+GROUP` and `-GROUP` lines to standard input as it starts and stops groups. Standard input
closes when the owner is gone, whichever way it went (SIGKILL, a crash, `os._exit`); what is still on the list
then gets SIGTERM, and SIGKILL after a short grace.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

GRACE_SECONDS = 2.0


def groups_left(lines: Iterable[str]) -> set[int]:
    """Groups added and not taken off again."""
    groups: set[int] = set()
    for line in lines:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    return groups


def _signal_groups(groups: set[int], number: signal.Signals) -> set[int]:
    """Signals each group; the ones that still had a member."""
    reached = set()
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
            reached.add(group)
    return reached


def main() -> None:
    left = _signal_groups(groups_left(sys.stdin), signal.SIGTERM)
    if left:
        time.sleep(GRACE_SECONDS)
        _signal_groups(left, signal.SIGKILL)


if __name__ == "__main__":
    main()
