"""Build hook: puts back the links of `src/prefixwatch/` where a checkout holds them as text files.

Git without symbolic links (Windows, `core.symlinks=false`) and some copies and archives write a link as a small file
with its target. An editable install imports through these links; a wheel or sdist doesn't read them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            restore_links(Path(self.root) / "src" / "prefixwatch")


def restore_links(package: Path) -> None:
    """Replaces each text file `../../ROOM` in `package` by a link to that folder."""
    for path in package.iterdir():
        if path.suffix or path.is_symlink() or not path.is_file():
            continue
        target = path.read_text(encoding="utf-8").strip()
        if target == f"../../{path.name}" and (package / target).is_dir():
            path.unlink()
            path.symlink_to(target, target_is_directory=True)
