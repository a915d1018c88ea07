"""Readers of traces whose rows name lengths and block ids: Mooncake's and its relatives, chat trees, session rows.

The dialect is detected from the keys, the tokens that a block id stands for from the numbers of ids, and the unit of
time from the dialect; each may be asked for instead. Where the content allows two readings, the file is refused with
the option that settles it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from prefixwatch.loadgen.recordings.fields import count, json_object, number, positive
from prefixwatch.loadgen.recordings.request import Lines, RecordedRequest

MOONCAKE_BLOCK_TOKENS = 512
CHAT_TREE_BLOCK_TOKENS = 16
BLOCK_SIZES = (512, 16, 32, 64, 128, 256, 1024)
"""Tokens that an id may stand for, the likeliest first."""
MIN_IDS_TO_SHOW_SIZE = 3
"""In one row: a single id fits many sizes."""
UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""Units of time stamps, in seconds' parts."""
_ROWS_TO_JUDGE_RATE, _FASTEST_PER_SECOND = 100, 5_000.0
"""A trace that is faster than this when read as milliseconds, of this many rows or more, may be in seconds."""

Rows = Sequence[tuple[str, Mapping[str, Any]]]


def mooncake(lines: Lines) -> Iterator[RecordedRequest]:
    """Rows of `timestamp`, `input_length`, `output_length`, `hash_ids`; sessions with `delay`, texts, lengths alone."""
    rows = [(lines.where, json_object(lines, line)) for line in lines]
    per_second, timed = _unit(lines, rows), any("timestamp" in row for _, row in rows)
    with_ids = any("hash_ids" in row for _, row in rows)
    size, names_partial = _block_size(lines, rows)
    lines.block_tokens = size if with_ids else None
    sessions = _Sessions()
    for where, row in rows:
        lines.at(where)
        if with_ids and "hash_ids" not in row:
            raise lines.error("has no hash_ids, and other lines have: what it shares with them is unknown")
        text, session = row.get("text_input"), sessions.of(row)
        prompt = None if isinstance(text, str) else count(lines, row, "input_length")
        delay = number(lines, row, "delay") / per_second if "delay" in row else None
        arrival = number(lines, row, "timestamp") / per_second if "timestamp" in row else None
        if arrival is None and delay is None and (timed or not session):
            raise lines.error("timestamp must be a number from 0 on, got None")
        yield RecordedRequest(
            where=where,
            arrival_s=0.0 if arrival is None and delay is None else arrival,
            prompt_tokens=prompt,
            output_tokens=count(lines, row, "output_length") if "output_length" in row else None,
            block_ids=_block_ids(lines, row, size, names_partial) if "hash_ids" in row else None,
            messages=({"role": "user", "content": text},) if isinstance(text, str) and not with_ids else None,
            session=session,
            tenant=str(row.get("tenant") or ""),
            model=str(row.get("model") or ""),
            delay_s=delay,
        )


def session_rows(lines: Lines) -> Iterator[RecordedRequest]:
    """A session per row, with `turns` of `input_tokens`, `output_tokens` and the wait before each (`tool_wait_s`,
    `delay_s`, or `delay` in ms)."""
    for line in lines:
        row = json_object(lines, line)
        session = str(row.get("session_id") or lines.where)
        began = number(lines, row, "timestamp") / _unit(lines, [(lines.where, row)]) if "timestamp" in row else 0.0
        if not isinstance(row.get("turns"), list) or not all(isinstance(turn, dict) for turn in row["turns"]):
            raise lines.error("turns must be a list of maps with input_tokens and output_tokens")
        wait = 0.0
        for position, turn in enumerate(row["turns"]):
            yield RecordedRequest(
                where=lines.where,
                arrival_s=None if position else began,
                prompt_tokens=count(lines, turn, "input_tokens"),
                output_tokens=positive(turn.get("output_tokens")),
                session=session,
                delay_s=_wait(lines, turn, "delay", wait) if position else None,
            )
            wait = _wait(lines, turn, "tool_wait", 0.0)  # a tool runs after this turn, and before the next


def _wait(lines: Lines, turn: Mapping[str, Any], name: str, default: float) -> float:
    if f"{name}_s" in turn:
        return number(lines, turn, f"{name}_s")
    return number(lines, turn, name) / 1e3 if name in turn else default


class _Sessions:
    """Names of sessions: `session_id`, or of a chat tree the chat that it began with."""

    def __init__(self) -> None:
        self._root: dict[str, str] = {}

    def of(self, row: Mapping[str, Any]) -> str:
        if "chat_id" not in row:
            return str(row.get("session_id") or "")
        chat, parent = str(row["chat_id"]), str(row.get("parent_chat_id", -1))
        self._root[chat] = self._root.get(parent, chat if parent == "-1" else parent)
        return self._root[chat]


def _unit(lines: Lines, rows: Rows) -> float:
    """Time stamps per second. Raises DocumentError where the content allows two readings."""
    if lines.time_unit is not None:
        return UNITS[lines.time_unit]
    if any("chat_id" in row for _, row in rows):
        return UNITS["s"]
    stamps = [row["timestamp"] for _, row in rows if isinstance(row.get("timestamp"), int | float)]
    span_s = (max(stamps) - min(stamps)) / UNITS["ms"] if stamps else 0.0
    if len(stamps) >= _ROWS_TO_JUDGE_RATE and span_s > 0 and len(stamps) / span_s > _FASTEST_PER_SECOND:
        raise lines.error(
            f"read as milliseconds, its time stamps make {len(stamps) / span_s:,.0f} requests per second: say which "
            "unit they have with --time-unit s or --time-unit ms"
        )
    return UNITS["ms"]


def _block_size(lines: Lines, rows: Rows) -> tuple[int, bool]:
    """Tokens per id, and whether a prompt's last, partial block has one: the first known size that fits every row."""
    known = [
        (row["input_length"], len(row["hash_ids"]))
        for _, row in rows
        if isinstance(row.get("hash_ids"), list) and isinstance(row.get("input_length"), int)
    ]
    tree = any("chat_id" in row for _, row in rows)
    asked = lines.asked_block_tokens or _named_size(lines, rows)
    usual = CHAT_TREE_BLOCK_TOKENS if tree else MOONCAKE_BLOCK_TOKENS
    sizes = [usual, *BLOCK_SIZES] if asked is None else [asked]
    named = [size for size in sizes if all(-(-prompt // size) == ids for prompt, ids in known)]
    unnamed = [size for size in sizes if all(prompt // size == ids for prompt, ids in known)]
    long_enough = max((ids for _, ids in known), default=0) >= MIN_IDS_TO_SHOW_SIZE
    if asked is not None:
        return asked, bool(named) or not unnamed
    if not long_enough:
        return usual, True
    return (named[0], True) if named else (unnamed[0], False) if unnamed else (usual, True)


def _named_size(lines: Lines, rows: Rows) -> int | None:
    """The rows' own `block_size`, as `prefixwatch trace export` writes it. Raises DocumentError for several."""
    sizes = {row["block_size"]: where for where, row in rows if positive(row.get("block_size"))}
    if len(sizes) > 1:
        (one, _), (other, where) = list(sizes.items())[:2]
        lines.at(where)
        raise lines.error(f"block_size {other}, and {one} in other lines: give one file per block size")
    return next(iter(sizes), None)


def _block_ids(lines: Lines, row: Mapping[str, Any], size: int, names_partial: bool) -> tuple[int, ...]:
    given, prompt = row["hash_ids"], count(lines, row, "input_length")
    ids = [_block_id(item) for item in given] if isinstance(given, list) else [None]
    if any(item is None for item in ids):
        raise lines.error("hash_ids must be a list of whole numbers from 0 on, or of hexadecimal texts")
    expected = -(-prompt // size) if names_partial else prompt // size
    if len(ids) != expected:
        raise lines.error(
            f"{len(ids)} hash_ids for input_length {prompt}: expected {expected}, one for every {size} tokens; "
            "--trace-block-size gives another number of tokens"
        )
    found = tuple(item for item in ids if item is not None)
    if max(found, default=0) >= 2**64:
        raise lines.error("a block id is above 64 bits")
    if names_partial or not prompt % size:
        return found
    return (*found, xxh3_64_intdigest(lines.where.encode()))  # what the partial block shares with others isn't known


def _block_id(item: Any) -> int | None:
    if isinstance(item, str):
        try:
            return int(item, 16)
        except ValueError:
            return None
    return item if isinstance(item, int) and not isinstance(item, bool) and item >= 0 else None
