"""How near reuse is, in four dimensions, each from 0 to 1, and their norm. Pure: requests in, shares out.

The exporter feeds it request records, a bench and a simulation feed it their request log; so the dimensions mean the
same everywhere. Time is counted in requests, so that no dimension depends on how fast the traffic is.

* temporal: how soon what is reused is used again, compared with the same requests in random order. Of a session's
  later request the use before is the session's last, of a first one its prefix's. With g requests since, and a share p
  of the window's requests that are of this session or prefix, a reuse counts max(0, 1 - g p), weighted by its hit
  tokens. Random order has 1/e = 0.37, however popular a prefix is; uses in turn have 0, bursts nearly 1.
* spatial: the chance that two reused tokens, drawn at random, belong to the same prefix: the sum of its shares squared.
  n equally popular prefixes have 1 / n.
* identity: of the tokens that sessions' first requests reuse, those of users who had another session before.
* topological: of the prompt tokens that some worker held, those held where the request was placed.

The norm is the root of the mean of the squares of those that are known: 1 when all are 1.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np

DIMENSIONS = ("temporal", "spatial", "identity", "topological")
NORM = "norm"
_COMPACTED_FROM = 1000

_Key = tuple[str, str | int]
"""A session or a prefix."""


@dataclass(frozen=True, slots=True)
class Use:
    """One completed request. An empty text, or None, is unknown."""

    at_s: float
    hit_tokens: int
    session: str = ""
    user: str = ""
    prefix: str | int = ""
    """Equal for prompts that open alike."""
    held_tokens: int | None = None
    """Of its prompt, at the worker that held most."""
    near_tokens: int | None = None
    """Of these, those held where it was placed."""


class _Reuses:
    """Of the window's uses that use something again: hit tokens, requests since the use before, and the key; with how
    often each key is used in the window. Key numbers are given again once no use of the window has the key."""

    def __init__(self) -> None:
        self._numbers: dict[_Key, int] = {}
        self._free: list[int] = []
        self._uses = array("q")
        """By key number."""
        self._first = 0
        """What lies before this position has left the window."""
        self._tokens, self._gaps, self._keys = array("d"), array("q"), array("q")

    def used(self, key: _Key) -> int:
        """Count a use of this key; return the key's number."""
        number = self._numbers.get(key)
        if number is None:
            if not self._free:
                self._free.append(len(self._uses))
                self._uses.append(0)
            number = self._numbers[key] = self._free.pop()
        self._uses[number] += 1
        return number

    def unused(self, key: _Key) -> None:
        """A use of this key left the window."""
        number = self._numbers[key]
        self._uses[number] -= 1
        if not self._uses[number]:
            self._free.append(self._numbers.pop(key))

    def add(self, tokens: int, gap: int, key_number: int) -> None:
        self._tokens.append(tokens)
        self._gaps.append(gap)
        self._keys.append(key_number)

    def drop_first(self) -> None:
        self._first += 1
        if self._first > _COMPACTED_FROM and 2 * self._first > len(self._gaps):
            for column in (self._tokens, self._gaps, self._keys):
                del column[: self._first]
            self._first = 0

    def soon(self, window_uses: int) -> float:
        """The sum of tokens · max(0, window_uses - gap · the key's uses): exact below 2**53."""
        if self._first == len(self._gaps):
            return 0.0
        tokens, gaps, keys = (np.asarray(column)[self._first :] for column in (self._tokens, self._gaps, self._keys))
        left = np.maximum(0, window_uses - gaps * np.asarray(self._uses)[keys])
        return float((tokens * left).sum())


@dataclass(frozen=True, slots=True)
class _Seen:
    """A use, and what was known of it when it came."""

    use: Use
    keys: list[_Key]
    again: bool
    """Whether it used something again."""
    identity: bool | None
    """Whether its user had another session; None for what isn't the first request of a known user's session."""


class Locality:
    """The uses of a window, in the order of their time; `most_keys` bounds the sessions, prefixes and users that are
    told apart, `most_uses` the window. Sums are kept as uses come and go."""

    def __init__(self, window_s: float = inf, most_keys: int = 1_000_000, most_uses: float = inf) -> None:
        self._window_s = window_s
        self._most_keys = most_keys
        self._most_uses = most_uses
        self._uses = 0
        self._last: OrderedDict[_Key, tuple[int, float]] = OrderedDict()
        """Number and time of the last use, the latest last."""
        self._session_of: OrderedDict[str, str] = OrderedDict()
        """User → the first session, or nothing once it has had two."""
        self._recent: deque[_Seen] = deque()
        self._reuses = _Reuses()
        self._prefix_tokens: Counter[str | int] = Counter()
        self._prefix_squares = 0
        """The sum of their squares."""
        self._again = 0
        """Hit tokens after a known use."""
        self._first = self._first_of_others = 0
        """Hit tokens of sessions' first requests; those of users who had another session."""
        self._held = self._near = 0
        """Tokens held at most, and where requests were placed."""

    def add(self, use: Use) -> None:
        """Uses come in order of their time."""
        self._uses += 1
        keys = _keys(use)
        later = bool(use.session) and ("session", use.session) in self._last
        key = keys[0] if later else keys[-1] if use.prefix != "" else None
        last = self._last.get(key) if key is not None and use.hit_tokens else None
        first_of_user = bool(use.user and use.session) and not later
        seen = _Seen(use, keys, last is not None, self._had_another_session(use) if first_of_user else None)
        self._recent.append(seen)
        self._count(seen, 1)
        now = self._uses, use.at_s
        for touched in keys:
            number = self._reuses.used(touched)
            if last is not None and touched is key:
                self._reuses.add(use.hit_tokens, self._uses - last[0], number)
            self._last[touched] = now
            self._last.move_to_end(touched)
        self._forget(use.at_s)

    def ratios(self, now_s: float | None = None) -> dict[str, float]:
        """By dimension, and the norm of those; one of which nothing is known in the window is left out."""
        if now_s is not None:
            self._forget(now_s)
        uses, by_prefix = len(self._recent), self._prefix_tokens.total()
        shares = {
            "temporal": (self._reuses.soon(uses), uses * self._again),
            "spatial": (self._prefix_squares, by_prefix**2),
            "identity": (self._first_of_others, self._first),
            "topological": (self._near, self._held),
        }
        found = {name: part / whole for name, (part, whole) in shares.items() if whole}
        return found | norm(found)

    def _count(self, seen: _Seen, sign: int) -> None:
        """Add what came, or, with −1, take away what left."""
        use = seen.use
        tokens = sign * use.hit_tokens
        if seen.again:
            self._again += tokens
        if seen.identity is not None:
            self._first += tokens
            self._first_of_others += tokens * seen.identity
        if tokens and use.prefix != "":
            before = self._prefix_tokens[use.prefix]
            now = before + tokens
            self._prefix_squares += now * now - before * before
            if now:
                self._prefix_tokens[use.prefix] = now
            else:
                del self._prefix_tokens[use.prefix]
        if use.near_tokens is not None and use.held_tokens is not None:
            self._near += sign * min(use.near_tokens, use.held_tokens)
            self._held += sign * use.held_tokens

    def _had_another_session(self, use: Use) -> bool:
        first = self._session_of.pop(use.user, None)
        other = first is not None and first != use.session
        self._session_of[use.user] = "" if other else use.session
        if len(self._session_of) > self._most_keys:
            self._session_of.popitem(last=False)
        return other

    def _forget(self, now_s: float) -> None:
        oldest = now_s - self._window_s
        while self._recent and (len(self._recent) > self._most_uses or self._recent[0].use.at_s < oldest):
            left = self._recent.popleft()
            self._count(left, -1)
            for key in left.keys:
                self._reuses.unused(key)
            if left.again:
                self._reuses.drop_first()
        while self._last and (len(self._last) > self._most_keys or next(iter(self._last.values()))[1] < oldest):
            self._last.popitem(last=False)


def _keys(use: Use) -> list[_Key]:
    keys: list[_Key] = [("session", use.session), ("prefix", use.prefix)]
    return [key for key in keys if key[1] != ""]


def norm(ratios: Mapping[str, float]) -> dict[str, float]:
    """The root mean square of the known dimensions; nothing where none is known."""
    known = [ratios[name] for name in DIMENSIONS if name in ratios]
    return {NORM: sqrt(sum(value * value for value in known) / len(known))} if known else {}
