"""Where results go: told before the work rather than after it, when it would be lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Literal

from stack.errors import UsageError

NOT_WRITTEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO})
"""What an operation on a file fails with when the disk is full or may not be written to."""


def make_out_folder(folder: Path, option: str = "--out") -> Path:
    """Make it if it isn't there. Raises UsageError when nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {folder}: can't be made ({error.strerror}): choose another folder") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{option} {folder}: can't be written to: choose another folder")
    return folder


def append_text(path: Path, text: str, option: str) -> None:
    """Append to a file such as $GITHUB_STEP_SUMMARY. Raises UsageError."""
    _write(path, text, option, "a")


def write_text(path: Path, text: str, option: str) -> None:
    """Write a file, in place of what it held. Raises UsageError."""
    _write(path, text, option, "w")


def _write(path: Path, text: str, option: str, mode: Literal["a", "w"]) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{option} {path}: can't be written to ({error.strerror}): choose another file") from error
