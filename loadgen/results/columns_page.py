"""docs/columns.md, generated from the docstrings of the rows: every column of requests.parquet and fleet.parquet.

`python -m prefixwatch.loadgen.results.columns_page` writes it again.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from prefixwatch.loadgen.request_log import fleet_rows, records

PAGE = Path(__file__).resolve().parents[2] / "docs" / "columns.md"
_INTRODUCTION = """\
# Columns

Generated from `loadgen/request_log/`. An unknown value is null, never 0. `prefixwatch.read_run(folder)` reads both
files into pandas; see [the Python API](api.md).
"""


def described(rows: type) -> dict[str, str]:
    """The docstring below each field of a row class, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(rows))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            has_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            found[field.target.id] = " ".join(str(text.value.value).split()) if has_text else ""  # type: ignore[union-attr]
    return found


def page() -> str:
    """The whole page."""
    sections = (
        ("requests.parquet", "One row per request of the plan.", records.RequestRecord, records.schema()),
        ("fleet.parquet", "One row per worker and reading, once a second.", fleet_rows.FleetRow, fleet_rows.SCHEMA),
    )
    return "\n".join([_INTRODUCTION, *(line for section in sections for line in _section(*section))])


def _section(file: str, what: str, rows: type, schema: pa.Schema) -> Iterator[str]:
    texts = described(rows)
    yield from (f"## {file}", "", what, "", "| column | type | meaning |", "|---|---|---|")
    for field in schema:
        yield f"| `{field.name}` | {field.type} | {texts[field.name]} |"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
