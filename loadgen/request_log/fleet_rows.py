"""Worker signals during a run: the rows of `fleet.parquet`, on the load generator's clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(slots=True)
class FleetRow:
    """One worker at one moment. Totals count from the worker's start, those of KV events from the run's; a figure
    that it doesn't give is None."""

    unix_s: float
    """When the worker's metrics were read."""
    policy: str
    """The routing policy of the run."""
    repeat: int
    """Number of the repeat, from 0."""
    worker: str
    """Name of the worker."""
    up: bool
    """Whether its metrics could be read."""
    running: float | None
    """Requests that the engine computes."""
    waiting: float | None
    """Requests in its queue."""
    kv_usage_ratio: float | None
    """Share of its KV blocks in use by running requests."""
    prefix_hit_tokens_total: float | None
    """Prompt tokens found in its prefix cache, since it started."""
    prefix_query_tokens_total: float | None
    """Prompt tokens looked up in its prefix cache, since it started."""
    counter_resets: int = 0
    """Number of resets of the worker's counters since the run's first reading."""
    kv_blocks_stored_total: int | None = None
    """KV blocks stored since the run began, by its KV events."""
    kv_blocks_removed_total: int | None = None
    """KV blocks evicted since the run began."""
    kv_cache_clears_total: int | None = None
    """How often its whole cache was cleared."""
    kv_batches_missed_total: int | None = None
    """Event batches that were lost: above 0, the counts of blocks are lower bounds."""
    at_s: float | None = None
    """Seconds on the request log's clock: 0 is the start of the measured phase. None for a run that never began."""


_ARROW_TYPES = {
    "float": pa.float64(),
    "str": pa.string(),
    "int": pa.int64(),
    "bool": pa.bool_(),
    "float | None": pa.float64(),
    "int | None": pa.int64(),
}

SCHEMA = pa.schema([pa.field(each.name, _ARROW_TYPES[str(each.type)]) for each in fields(FleetRow)])


def put_on_clock(rows: Sequence[FleetRow], zero_unix_seconds: float | None) -> None:
    """Set `at_s`; the argument is run.json's."""
    for row in rows:
        row.at_s = None if zero_unix_seconds is None else row.unix_s - zero_unix_seconds


def write_fleet(path: Path, rows: Sequence[FleetRow]) -> None:
    """Write `fleet.parquet`."""
    pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows], schema=SCHEMA), path)


def read_fleet(path: Path) -> list[FleetRow]:
    """Read `fleet.parquet`; what it is too old to have is at its default. Raises OSError or ValueError."""
    try:
        return [FleetRow(**row) for row in pq.read_table(path).to_pylist()]
    except TypeError as error:  # a column that isn't ours
        raise ValueError(f"{path}: not a log of this kind ({error}): run the bench again") from error
