"""What makes rules impossible to write: one message, with the arithmetic and the remedy."""

from __future__ import annotations


class RuleError(Exception):
    """A rule that can't be written, or would never fire."""
