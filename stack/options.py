"""Checks of options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies import make_policy
from stack.errors import UsageError


def check_policies(names: Sequence[str], option: str = "--policy") -> list[str]:
    """The policies named by this option. Raises UsageError for none, for one named twice or unknown."""
    if not names:
        raise UsageError(f"{option} names no policy: give one or more, separated by commas")
    for name in names:
        if list(names).count(name) > 1:
            raise UsageError(f"{option} names '{name}' twice")
        try:
            make_policy(name)
        except ValueError as error:
            raise UsageError(f"{option}: {error}") from error
    return list(names)
