"""Readers of the request logs of vLLM (`--enable-log-requests`) and SGLang (`--log-requests`), as text or JSON lines.

Prompts are as the engine saw them, chat template included; token ids are read where the log has no text. Lines about
other things are skipped.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from prefixwatch.loadgen.recordings.fields import iso_seconds, positive
from prefixwatch.loadgen.recordings.request import Lines, RecordedRequest
from prefixwatch.loadgen.recordings.token_ids import TOKEN_BLOCK, block_ids_of

TEMPLATED = (
    "Prompts are as the engine saw them, with its chat template: a replay through the chat API adds the template again."
)
_WITHOUT_YEAR = 2000
"""vLLM's time stamps have no year; a leap year, so that each of them is a date."""

_TEXT = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
"""A text as Python's repr writes it."""
_VLLM_TIME = re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b")
_VLLM_RECEIVED = re.compile(r"Received request (?P<id>\S+?): (?P<rest>.*)")
_VLLM_DETAILS = re.compile(r"Request (?P<id>\S+) details: (?P<rest>.*)")
_VLLM_OUTPUT = re.compile(r"Generated response (?P<id>\S+?)(?: \(.*?\))?(?: details)?: .*output_token_ids: \[(.*?)\]")
_PROMPT = re.compile(rf"\bprompt: (?P<text>{_TEXT})")
_PROMPT_IDS = re.compile(r"\bprompt_token_ids: (?P<ids>\[[\d, ]*\])")
_MAX_TOKENS = re.compile(r"\bmax_tokens=(\d+)")

_SGLANG_LINE = re.compile(
    r"\[(?P<time>\d{4}-\d\d-\d\d[ T][\d:.,]+)[^\]]*\].*?\b(?P<event>Receive|Finish): obj=(?P<rest>.*)"
)
_SGLANG_CUT = re.compile(rf"\b(?:text|input_ids)=(?:{_TEXT}|\[[\d, ]*\]) \.\.\. ")
_SGLANG_JSON_CUT = 2051
"""Characters of a text that level 2 cut: 1,024 from each end around three dots."""

VLLM_MARK = re.compile(r"Received request \S+: |Request \S+ details: prompt: ")
SGLANG_MARK = _SGLANG_LINE


@dataclass
class _Seen:
    """What the log says of one request, put together from several lines."""

    where: str
    arrival_s: float | None = None
    text: str | None = None
    ids: list[int] | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    most_tokens: int | None = None
    received: bool = False

    def request(self, lines: Lines) -> RecordedRequest:
        lines.at(self.where)
        if self.ids and not self.text:
            lines.block_tokens = TOKEN_BLOCK
        elif self.text:
            lines.note(TEMPLATED)
        ids = self.ids if self.ids and not self.text else None
        return RecordedRequest(
            where=self.where,
            arrival_s=self.arrival_s,
            prompt_tokens=len(self.ids) if self.ids else self.prompt_tokens,
            output_tokens=self.output_tokens or self.most_tokens,
            block_ids=None if ids is None else block_ids_of(ids),
            messages=({"role": "user", "content": self.text},) if self.text else None,
        )


@dataclass
class _Log:
    """The requests of a log by their ids, in the order of their first lines."""

    lines: Lines
    level: str
    """How to make the engine log prompts, for messages."""
    seen: dict[str, _Seen] = field(default_factory=dict)

    def of(self, name: str) -> _Seen:
        return self.seen.setdefault(name, _Seen(self.lines.where))

    def requests(self) -> Iterator[RecordedRequest]:
        for seen in self.seen.values():
            if not (seen.text or seen.ids or seen.prompt_tokens):
                self.lines.at(seen.where)
                raise self.lines.error(f"the log has neither the prompt nor its length: log with {self.level}")
            yield seen.request(self.lines)


def vllm(lines: Lines) -> Iterator[RecordedRequest]:
    """`Received request ID: …` and `Request ID details: …` lines; times are whole seconds."""
    log = _Log(lines, "--enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG")
    for line in lines:
        if done := _VLLM_OUTPUT.search(line):
            tokens = sum(bool(part.strip()) for part in done.group(2).split(","))
            if done.group("id") in log.seen:
                log.of(done.group("id")).output_tokens = positive(tokens)
            continue
        found = _VLLM_RECEIVED.search(line) or _VLLM_DETAILS.search(line)
        if found is None:
            continue
        seen, rest = log.of(found.group("id")), found.group("rest")
        if seen.arrival_s is None:
            seen.arrival_s = _vllm_time(line)
        if (text := _PROMPT.search(rest)) is not None:
            seen.text = ast.literal_eval(text.group("text")) or None
        if (ids := _PROMPT_IDS.search(rest)) is not None:
            seen.ids = json.loads(ids.group("ids"))
        if (most := _MAX_TOKENS.search(rest)) is not None:
            seen.most_tokens = positive(int(most.group(1)))
    yield from log.requests()


def _vllm_time(line: str) -> float | None:
    found = _VLLM_TIME.search(line)
    if found is None:
        return None
    moment = datetime.strptime(f"{_WITHOUT_YEAR}-{found.group(1)}", "%Y-%m-%d %H:%M:%S")
    return moment.replace(tzinfo=UTC).timestamp()


def sglang(lines: Lines) -> Iterator[RecordedRequest]:
    """`Receive: obj=…` and `Finish: obj=…` lines, or JSON lines of events request.received and request.finished."""
    log = _Log(lines, "--log-requests-level 3")
    for line in lines:
        if line.lstrip().startswith("{"):
            _sglang_json(log, line)
        elif (found := _SGLANG_LINE.search(line)) is not None:
            _sglang_text(log, found)
    yield from log.requests()


def _sglang_json(log: _Log, line: str) -> None:
    try:
        row = json.loads(line)
    except ValueError:
        return
    event, obj = row.get("event"), row.get("obj")
    if event not in ("request.received", "request.finished") or not isinstance(obj, dict):
        return
    seen = log.of(str(row.get("rid") or obj.get("rid")))
    _at(seen, event == "request.received", iso_seconds(str(row["timestamp"])), row.get("out") or {})
    text, ids = obj.get("text"), obj.get("input_ids")
    if isinstance(text, str) and len(text) == _SGLANG_JSON_CUT and text[1024:1027] == "...":
        raise _cut(log)
    if isinstance(ids, list) and "..." in ids:
        raise _cut(log)
    seen.text, seen.ids = text or seen.text, ids or seen.ids
    seen.most_tokens = positive((obj.get("sampling_params") or {}).get("max_new_tokens")) or seen.most_tokens


def _sglang_text(log: _Log, found: re.Match[str]) -> None:
    rest = found.group("rest")
    if _SGLANG_CUT.search(rest):
        raise _cut(log)

    text = re.search(rf"\btext=({_TEXT})", rest)
    if text is not None:  # a prompt may look like the rest of the line
        rest = rest.replace(text.group(0), "")
    seen = log.of(_found(rf"\brid=({_TEXT})", rest, ast.literal_eval))
    counts = {name: _found(rf"'{name}': (\d+)", rest, int) for name in ("prompt_tokens", "completion_tokens")}
    time_s = iso_seconds(found.group("time").replace(",", "."))
    _at(seen, found.group("event") == "Receive", time_s, {"meta_info": counts})
    seen.text = (ast.literal_eval(text.group(1)) if text is not None else None) or seen.text
    seen.ids = _found(r"\binput_ids=(\[[\d, ]*\])", rest, json.loads) or seen.ids
    seen.most_tokens = _found(r"'max_new_tokens': (\d+)", rest, int) or seen.most_tokens


def _found(pattern: str, text: str, read: Callable[[str], Any]) -> Any:
    hit = re.search(pattern, text)
    return None if hit is None else read(hit.group(1))


def _at(seen: _Seen, received: bool, time_s: float, out: Mapping[str, Any]) -> None:
    if seen.arrival_s is None or (received and not seen.received):
        seen.arrival_s = time_s
    seen.received = seen.received or received
    counts = out.get("meta_info") or {}
    seen.prompt_tokens = positive(counts.get("prompt_tokens")) or seen.prompt_tokens
    seen.output_tokens = positive(counts.get("completion_tokens")) or seen.output_tokens


def _cut(log: _Log) -> Exception:
    return log.lines.error(f"the log has cut this prompt short: log with {log.level}")
