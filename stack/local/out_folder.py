"""Files and folders that commands write. Checked before the work, so that no result is lost after it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from rich.console import Console

from prefixwatch.stack.errors import UsageError

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


def file_name(label: str) -> str:
    """A policy's label as part of a file's name."""
    return re.sub(r"[^\w.=-]+", "_", label)


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


def write_files(wanted: Mapping[Path, str], folder: Path, console: Console) -> None:
    """Write these files, with their folders. Raises UsageError."""
    for path, text in wanted.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path}: can't be written: {error.strerror or error}") from error
    console.print(f"{len(wanted)} files written to {folder}", highlight=False, soft_wrap=True)


def report_outdated(wanted: Mapping[Path, str], present: Iterable[Path], remedy: str, console: Console) -> int:
    """Print which files a build would add or change, and which of `present` it no longer makes: 1 if any."""
    wrong = [f"{path}: {'differs' if path.is_file() else 'missing'}" for path in wanted if _text(path) != wanted[path]]
    wrong += [f"{path}: no longer made, delete it" for path in sorted(set(present) - wanted.keys())]
    for line in wrong:
        console.print(line, highlight=False, soft_wrap=True)
    if wrong:
        console.print(f"out of date: {remedy}", highlight=False, soft_wrap=True)
    return 1 if wrong else 0


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
