"""Plain English words: most tokenizers have each of them as one token."""

from __future__ import annotations

from pathlib import Path


def words() -> list[str]:
    """In the file's order, without spaces."""
    return Path(__file__).with_name("words.txt").read_text(encoding="ascii").split()
