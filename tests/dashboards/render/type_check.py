"""The shipped dashboards held against the types of @grafana/schema by `tsc --strict`.

A dashboard becomes a constant of the type that Grafana reads it as: `const dashboard: Dashboard = {…}`. What that type
leaves open, the options and field settings of a panel, is held against the types of the panel's own plugin.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixwatch.documents import DocumentError
from tests.dashboards.render import FOLDER

_V2 = "dashboard.grafana.app/v2beta1"
_RAW = "@grafana/schema/dist/esm/raw/composable"


@dataclass(frozen=True, slots=True)
class _Plugin:
    """A panel type's own types, as TypeScript imports and names them."""

    imports: str
    options: str
    settings: str | None = None


_PLUGINS = {
    "stat": _Plugin(f"import type * as stat from '{_RAW}/stat/panelcfg/x/StatPanelCfg_types.gen'", "stat.Options"),
    "bargauge": _Plugin(
        f"import type * as bars from '{_RAW}/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen'", "bars.Options"
    ),
    "timeseries": _Plugin(
        f"import type * as lines from '{_RAW}/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen'",
        "lines.Options",
        "lines.FieldConfig",
    ),
    "heatmap": _Plugin(
        f"import type * as heatmap from '{_RAW}/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen'",
        "heatmap.Options",
        "heatmap.FieldConfig",
    ),
    "table": _Plugin(
        f"import type * as table from '{_RAW}/table/panelcfg/x/TablePanelCfg_types.gen';\n"
        "import type { Table } from '../src/schema'",
        "Table",
        "table.FieldConfig",
    ),
}


def type_errors(dashboards: Mapping[str, Mapping[str, Any]], manifests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What tsc says, a line an error, by file name; empty when all is well. Raises DocumentError without a tsc."""
    compiler = FOLDER / "node_modules" / ".bin" / "tsc"
    if not compiler.exists():
        raise DocumentError(f"{FOLDER} has no node_modules: scripts/install-render installs them")
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".types-") as name:
        folder = Path(name)
        for file, text in {**_classic_files(dashboards), **_manifest_files(manifests)}.items():
            (folder / file).write_text(text, encoding="utf-8")
        project = {"extends": "../tsconfig.json", "include": ["*.ts"]}
        (folder / "tsconfig.json").write_text(json.dumps(project), encoding="utf-8")
        command = [str(compiler), "--project", name, "--pretty", "false"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if line]
    if done.returncode and not errors:
        raise DocumentError(f"tsc ended with code {done.returncode}: {done.stderr.strip()}")
    return errors


def _classic_files(dashboards: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {f"{name}.ts": "\n".join(_classic_lines(dashboard)) + "\n" for name, dashboard in dashboards.items()}


def _classic_lines(dashboard: Mapping[str, Any]) -> Iterator[str]:
    panels = list(_panels(dashboard))
    unknown = [f"'{panel['title']}' ({panel['type']})" for panel in panels if panel["type"] not in _PLUGINS]
    if unknown:
        raise DocumentError(f"{dashboard['title']}: no types are known for the options of {', '.join(unknown)}")
    yield "import type { ClassicDashboard, Plain } from '../src/schema';"
    yield from sorted({f"{_PLUGINS[panel['type']].imports};" for panel in panels})
    yield f"export const dashboard: ClassicDashboard = {_json(dashboard)};"
    for panel in panels:
        plugin = _PLUGINS[panel["type"]]
        yield f"export const options{panel['id']}: Plain<Partial<{plugin.options}>> = {_json(panel['options'])};"
        settings = panel["fieldConfig"]["defaults"].get("custom")
        if plugin.settings and settings:
            yield f"export const custom{panel['id']}: Plain<Partial<{plugin.settings}>> = {_json(settings)};"


def _panels(dashboard: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", ())
        else:
            yield panel


def _manifest_files(manifests: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    head = f"import type {{ Spec }} from '@grafana/schema/apis/{_V2}';\nimport type {{ Plain }} from '../src/schema';\n"
    files = {}
    for name, manifest in manifests.items():
        if manifest["apiVersion"] != _V2:
            raise DocumentError(f"manifest {name}: apiVersion is {manifest['apiVersion']}, its types are of {_V2}")
        files[f"{name}.v2.ts"] = f"{head}export const spec: Plain<Spec> = {_json(manifest['spec'])};\n"
    return files


def _json(value: Any) -> str:
    """Indented, so that a line of an error is a line of the dashboard."""
    return json.dumps(value, indent=2, ensure_ascii=False)
