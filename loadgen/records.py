"""The request log: one row a request, never a row less.

Written by the load generator, read by grading, reports and comparisons. Times are seconds on the load
generator's monotonic clock, counted from the start of the measured phase, so that latency can be taken from
the *scheduled* time. What a request didn't have (no first token, no usage) is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # and where it is used: a run sends its first request sooner without
    import pyarrow as pa


class Outcome(StrEnum):
    """How a request ended. All but `completed` are bad for goodput."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """Turned away: HTTP 429 or 503, or an overload error inside a 200."""
    FAILED = "failed"
    """Any other error, before or after the first token: see `error`."""
    TIMED_OUT = "timed_out"
    """No answer, or no further token, within the scenario's time-outs."""
    CUT_OFF = "cut_off"
    """Still running when the run ended; its times so far are lower bounds."""


@dataclass(slots=True)
class RequestRecord:
    """One request of a run."""

    id: str
    policy: str
    repeat: int
    index: int
    """Position in the plan: the same in every policy and repeat, so requests can be paired."""
    phase: str
    """`prime` (fills caches), `warm_up`, `measured` or `cool_down`; only `measured` is graded."""
    tenant: str
    session: str
    turn: int
    group: str
    """The shared prefix this request starts with."""
    request_class: str
    """What objectives select by; from the scenario."""
    scheduled_s: float
    sent_s: float | None = None
    first_byte_s: float | None = None
    first_token_s: float | None = None
    """First non-empty content, reasoning or tool-call delta, stamped at the socket read that held it."""
    end_s: float | None = None
    outcome: Outcome = Outcome.CUT_OFF
    status: int | None = None
    """HTTP status."""
    error: str = ""
    """Why it was refused or failed, in a few words; empty when completed."""
    planned_prompt_tokens: int = 0
    planned_shared_tokens: int = 0
    """Prompt tokens that an earlier request of the plan (same namespace) already carried as its opening."""
    planned_template_tokens: int = 0
    """Prompt tokens at its head that are the chat template's own: caches may hold them from before the run."""
    prompt_tokens: int | None = None
    """As the engine reports it in usage."""
    cached_tokens: int | None = None
    """Prompt tokens the engine reports as reused; None when it reports nothing."""
    output_tokens: int | None = None
    chunk_gaps_ms: list[float] = field(default_factory=list)
    """Gaps between socket reads that brought content, after the first token."""
    worker: str = ""
    reason: str = ""
    """The router's branch for this decision."""
    predicted_tokens: int | None = None
    """Cached tokens the router expected at the chosen worker."""
    decision_us: float | None = None
    """Router: tokenise, hash, look up and choose, microseconds."""
    retries: int = 0
    scores: str = ""
    """The policy's scores of the chosen worker and its closest rivals: a JSON object, workers to figures."""
    predicted_queue_s: float | None = None
    """Wait for the prefill, and the prefill itself, as the policy reckoned; None where it doesn't reckon in time."""
    predicted_prefill_s: float | None = None
    prediction_cause: str = ""
    """A `kvcache.prediction.PredictionCause`; empty for a request without a first token."""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token from the *scheduled* time, seconds."""
        return None if self.first_token_s is None else self.first_token_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, to the *last token* (usage and `[DONE]` come after it), seconds.

        Undefined below two tokens.
        """
        if self.first_token_s is None or self.end_s is None or not self.output_tokens or self.output_tokens < 2:
            return None
        seconds = sum(self.chunk_gaps_ms) / 1e3 if self.chunk_gaps_ms else self.end_s - self.first_token_s
        return seconds / (self.output_tokens - 1)

    @property
    def client_lag_s(self) -> float | None:
        """How late the load generator sent it, seconds."""
        return None if self.sent_s is None else self.sent_s - self.scheduled_s


SCHEMA_VERSION = 1


@cache
def schema() -> pa.Schema:
    """The log's columns: the fields of `RequestRecord`."""
    import pyarrow as pa  # noqa: PLC0415

    types = {
        "str": pa.string(),
        "int": pa.int64(),
        "float": pa.float64(),
        "int | None": pa.int64(),
        "float | None": pa.float64(),
        "list[float]": pa.list_(pa.float32()),
        "Outcome": pa.string(),
    }
    return pa.schema(
        [pa.field(f.name, types[str(f.type)]) for f in fields(RequestRecord)],
        metadata={"prefixwatch.requests.schema": str(SCHEMA_VERSION)},
    )


def table_of(records: Iterable[RequestRecord]) -> pa.Table:
    """The records as an Arrow table of `schema`, column by column."""
    import pyarrow as pa  # noqa: PLC0415

    rows, wanted = list(records), schema()
    columns = [pa.array([getattr(row, name) for row in rows], wanted.field(name).type) for name in wanted.names]
    return pa.Table.from_arrays(columns, schema=wanted)


def write_requests(path: Path, records: Iterable[RequestRecord]) -> None:
    """Write `requests.parquet`."""
    import pyarrow.parquet as pq  # noqa: PLC0415

    pq.write_table(table_of(records), path)


def read_request_table(path: Path) -> pa.Table:
    """`requests.parquet` as an Arrow table: a million requests take a few hundred megabytes this way.

    Raises ValueError when the file is no request log, or one of another schema version.
    """
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error}): give a run's requests.parquet") from error
    version = (table.schema.metadata or {}).get(b"prefixwatch.requests.schema", b"none").decode()
    if version != str(SCHEMA_VERSION):
        raise ValueError(f"{path}: request log of schema {version}, this version reads {SCHEMA_VERSION}: run it again")
    return table


def read_requests(path: Path) -> Sequence[RequestRecord]:
    """Read `requests.parquet`; columns that it is too old to have are at their defaults. Raises ValueError."""
    return [record_from(row) for row in read_request_table(path).to_pylist()]


def record_from(row: dict[str, Any]) -> RequestRecord:
    """A record from its field values, as JSON and Parquet hold them."""
    return RequestRecord(**{**row, "outcome": Outcome(row["outcome"])})
