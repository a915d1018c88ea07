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

from prefixwatch.kvcache.blocks import DEFAULT_BLOCK_SIZE

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
    """The answer had begun and broke off."""
    CANCELLED = "cancelled"
    """Still running when the run ended, and cancelled by the load generator; its times so far are lower bounds."""
    NEVER_SENT = "never_sent"
    """Not sent, because the run was stopped."""


@dataclass(slots=True)
class RequestRecord:
    """One request of a run."""

    id: str
    """Unique within the file."""
    policy: str
    """The routing policy that served it, or the label of the run."""
    repeat: int
    """Number of the repeat, from 0."""
    index: int
    """Position in the plan: the same in every policy and repeat, so requests can be paired."""
    phase: str
    """`prime` (fills caches), `warm_up`, `measured` or `cool_down`; only `measured` is graded."""
    tenant: str
    """Whose cache namespace it is in; `-` without tenants."""
    session: str
    """The conversation it belongs to; a target gets it with the run's nonce (`run.json`) behind it."""
    turn: int
    """Position in its session, from 0."""
    group: str
    """The shared prefix this request starts with."""
    request_class: str
    """From the scenario; objectives select by it."""
    scheduled_s: float
    """When it was due. All times count from the start of the measured phase, on the load generator's clock; priming
    requests have negative ones."""
    sent_s: float | None = None
    """When the load generator began to send it; later than `scheduled_s` by the client's lag."""
    first_byte_s: float | None = None
    """First byte of the response."""
    first_token_s: float | None = None
    """First non-empty content, reasoning or tool-call delta, stamped at the socket read that held it."""
    first_answer_s: float | None = None
    """First token of the answer proper: text or a tool call, after any reasoning."""
    end_s: float | None = None
    """End of the response, or of the wait for it."""
    outcome: Outcome = Outcome.NEVER_SENT
    """`completed`, `refused` (for want of capacity), `failed`, `timed_out`, `cut_off` (the answer broke off),
    `cancelled` (still running at the end of the run) or `never_sent`."""
    status: int | None = None
    """HTTP status."""
    error: str = ""
    """Why it was refused or failed, in a few words; empty when completed."""
    planned_prompt_tokens: int = 0
    """Length of the prompt in the plan, chat template included."""
    planned_shared_tokens: int = 0
    """Prompt tokens that an earlier request of the plan (same namespace) already carried as its opening."""
    planned_template_tokens: int = 0
    """Prompt tokens at its head that are the chat template's own: caches may hold them from before the run."""
    user: str = ""
    """Whose session it is; empty where the plan has no users."""
    planned_part_classes: list[str] = field(default_factory=list)
    """What the prompt is made of, from its first token on: `system`, `tools`, `examples`, `profile` (of the user),
    `documents`, `turns`, `changing` (a field in front) or `template`; empty where the plan doesn't know."""
    planned_part_tokens: list[int] = field(default_factory=list)
    """Length of each of these parts."""
    prompt_tokens: int | None = None
    """As the engine reports it in usage."""
    cached_tokens: int | None = None
    """Prompt tokens the engine reports as reused; None when it reports nothing."""
    output_tokens: int | None = None
    """As the engine reports it in usage."""
    chunk_gaps_ms: list[float] = field(default_factory=list)
    """Gaps between socket reads that brought content, after the first token."""
    worker: str = ""
    """The worker that served it, from the router's response header; empty if unknown."""
    reason: str = ""
    """The router's branch for this decision."""
    predicted_tokens: int | None = None
    """Cached tokens the router expected at the chosen worker."""
    decision_us: float | None = None
    """Time of the router to tokenize, hash, look up and choose."""
    retries: int = 0
    """How often the router tried another worker."""
    scores: str = ""
    """The policy's scores of the chosen worker and its closest rivals: a JSON object, workers to figures."""
    predicted_queue_s: float | None = None
    """Wait for the prefill that the policy expected; None where it doesn't estimate times."""
    predicted_prefill_s: float | None = None
    """The prefill itself, as the policy expected it."""
    prediction_cause: str = ""
    """A `kvcache.prediction.PredictionCause`, such as `exact` or `over_credited`; empty for a request without a first
    token."""
    prefill_s: float | None = None
    """Time to compute what wasn't cached of the prompt: the first part of Cost_miss. Measured in a simulation; behind a
    router its estimate, by the first tokens that it saw."""
    queue_s: float | None = None
    """Wait for the prefill: the second part; what prefill and migration leave of the time to first token."""
    migrate_s: float | None = None
    """Wait for blocks on their way, of a moved session, from another cache or a prefill worker: the third part."""
    move: str = ""
    """`soft` (blocks sent) or `hard` (computed again) for the first request of a session that was moved on purpose."""
    move_why: str = ""
    """A `router.sessions.price.Why`, such as `blocks_sooner` or `no_connector`."""
    move_trigger: str = ""
    """`drain`, `death`, `overload` or `scale_in`."""
    move_soft_s: float | None = None
    """What the soft move was expected to take until a first token; None where there was no way, or it isn't known."""
    move_hard_s: float | None = None
    """The same of the hard move."""
    move_transfer_s: float | None = None
    """Of a soft move, from the decision to the expected end of the transfer."""

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


SCHEMA_VERSION = 2
BROKEN_OFF = ("eof_without_done", "eof_in_body", "midstream_reset")
"""Errors of answers that had begun and broke off."""


_VERSION_KEY, _BLOCK_SIZE_KEY = b"prefixwatch.requests.schema", b"prefixwatch.block_size"


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
        "list[int]": pa.list_(pa.int64()),
        "list[str]": pa.list_(pa.string()),
        "Outcome": pa.string(),
    }
    return pa.schema(
        [pa.field(f.name, types[str(f.type)]) for f in fields(RequestRecord)],
        metadata={_VERSION_KEY: str(SCHEMA_VERSION)},
    )


def table_of(records: Iterable[RequestRecord]) -> pa.Table:
    """The records as an Arrow table of `schema`, column by column."""
    import pyarrow as pa  # noqa: PLC0415

    rows, wanted = list(records), schema()
    columns = [pa.array([getattr(row, name) for row in rows], wanted.field(name).type) for name in wanted.names]
    return pa.Table.from_arrays(columns, schema=wanted)


def write_requests(path: Path, records: Iterable[RequestRecord], block_size: int = DEFAULT_BLOCK_SIZE) -> None:
    """Write `requests.parquet`. `block_size`: tokens per KV block of the engines; cache classes depend on it."""
    import pyarrow.parquet as pq  # noqa: PLC0415

    table = table_of(records)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, _BLOCK_SIZE_KEY: str(block_size)}), path)


def block_size_of(table: pa.Table) -> int:
    """Tokens per KV block of the engines that served this log; the default for a log that doesn't say."""
    return int((table.schema.metadata or {}).get(_BLOCK_SIZE_KEY, DEFAULT_BLOCK_SIZE))


def read_request_table(path: Path) -> pa.Table:
    """`requests.parquet` as an Arrow table: a million requests take a few hundred megabytes this way.

    Raises ValueError when the file isn't a request log, or has an unknown schema version.
    """
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error}): give a run's requests.parquet") from error
    version = (table.schema.metadata or {}).get(_VERSION_KEY, b"none").decode()
    if version == "1":
        return _from_schema_1(table)
    if version != str(SCHEMA_VERSION):
        raise ValueError(f"{path}: request log of schema {version}, this version reads 1 and 2: run it again")
    return table


def _from_schema_1(table: pa.Table) -> pa.Table:
    """Schema 1 had one outcome, `cut_off`, for what was cancelled at the end and for what was never sent, and counted
    broken answers as failed."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.compute as pc  # noqa: PLC0415

    outcome, broken = table["outcome"], pc.is_in(table["error"], pa.array(BROKEN_OFF))
    ended = pc.if_else(pc.is_null(table["sent_s"]), Outcome.NEVER_SENT.value, Outcome.CANCELLED.value)
    outcome = pc.if_else(pc.equal(outcome, "cut_off"), ended, pc.if_else(broken, Outcome.CUT_OFF.value, outcome))
    return table.set_column(table.schema.get_field_index("outcome"), "outcome", outcome)


def read_requests(path: Path) -> Sequence[RequestRecord]:
    """Read `requests.parquet`; columns that it is too old to have are at their defaults. Raises ValueError."""
    return [record_from(row) for row in read_request_table(path).to_pylist()]


def record_from(row: dict[str, Any]) -> RequestRecord:
    """A record from its field values, as JSON and Parquet hold them."""
    return RequestRecord(**{**row, "outcome": Outcome(row["outcome"])})
