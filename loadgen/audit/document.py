"""The audit's document, `audit.json`: content and its SHA-256; and the reading of it and of published audits.

The digest is of the content alone, as UTF-8 JSON with sorted keys and without blanks, so that any program can check it:

    jq -jcS .audit audit.json | sha256sum      # where no number needs more than 17 digits
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.audit.statistics import Floats

KIND = "prefixwatch isolation audit"
VERSION = 1
_LEAST_TIMES = 20


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with its digest."""
    return {"sha256": digest(content), "audit": content}


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of the content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_audit(file: Path) -> dict[str, Any]:
    """The content of an audit.json. Raises InputError for another file, or one that was changed since."""
    whole = _json(file.read_bytes(), str(file))
    content = whole.get("audit")
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise InputError(
            f"{file} is not an audit.json of prefixwatch, nor published timings with cache_hit and cache_miss"
        )
    if content.get("version") != VERSION:
        raise InputError(f"{file}: version {content.get('version')}: this prefixwatch reads version {VERSION}")
    if whole.get("sha256") != (found := digest(content)):
        raise InputError(
            f"{file} was changed after it was written: its content has the SHA-256 {found}, not {whole.get('sha256')}: "
            "use the original"
        )
    return content


def published_timings(path: Path) -> dict[str, tuple[Floats, Floats]]:
    """Hit and miss times of each audit in a published archive (.zip), folder or file, by its name within.

    The format is that of https://github.com/chenchenygu/auditing-prompt-caching: `cache_hit` and `cache_miss`, lists
    with a `client_time` each. Audits with fewer than 20 times on a side are left out. Empty where there are none.
    """
    found = {}
    for name, data in _files(path):
        whole = _json(data, name)
        if not {"cache_hit", "cache_miss"} <= whole.keys():
            continue
        hits, misses = (_times(whole[key], name) for key in ("cache_hit", "cache_miss"))
        if min(len(hits), len(misses)) >= _LEAST_TIMES:
            found[name] = hits, misses
    return found


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.is_dir():
        for file in sorted(path.rglob("*.json")):
            yield file.relative_to(path).as_posix(), file.read_bytes()
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".json") and "__MACOSX" not in PurePosixPath(name).parts:
                    yield name, archive.read(name)
    else:
        yield path.name, path.read_bytes()


def _json(data: bytes, name: str) -> dict[str, Any]:
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not JSON: {error}") from error
    return whole if isinstance(whole, dict) else {}


def _times(rows: Any, name: str) -> Floats:
    try:
        times = np.array([float(row["client_time"]) for row in rows if row["client_time"]])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{name}: each entry of cache_hit and cache_miss needs a client_time in seconds") from error
    if not np.isfinite(times).all():
        raise InputError(f"{name}: a client_time is not a finite number")
    return times
