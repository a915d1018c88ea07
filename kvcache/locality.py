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

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, sqrt

DIMENSIONS = ("temporal", "spatial", "identity", "topological")
NORM = "norm"

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


@dataclass(frozen=True, slots=True)
class _Seen:
    """A use, and what was known of it when it came."""

    use: Use
    again: _Key | None
    """What was used before; None for a first use, or where nothing was reused."""
    gap: int
    """Requests since then."""
    identity: bool | None
    """Whether its user had another session; None for what isn't the first request of a known user's session."""


class Locality:
    """The uses of a window, in the order of their time; `most_keys` bounds the sessions, prefixes and users that are
    told apart, `most_uses` the window; None: it is bounded by time alone."""

    def __init__(self, window_s: float = inf, most_keys: int = 1_000_000, most_uses: int | None = None) -> None:
        self._window_s = window_s
        self._most_keys = most_keys
        self._uses = 0
        self._last: OrderedDict[_Key, tuple[int, float]] = OrderedDict()
        """Number and time of the last use, the latest last."""
        self._session_of: OrderedDict[str, str] = OrderedDict()
        """User → the first session, or nothing once it has had two."""
        self._recent: deque[_Seen] = deque(maxlen=most_uses)

    def add(self, use: Use) -> None:
        """Uses come in order of their time."""
        self._uses += 1
        keys = _keys(use)
        later = bool(use.session) and ("session", use.session) in self._last
        key = next((key for key in keys if later or key[0] == "prefix"), None)
        last = self._last.get(key) if key is not None and use.hit_tokens else None
        first_of_user = bool(use.user and use.session) and not later
        self._recent.append(
            _Seen(
                use=use,
                again=key if last is not None else None,
                gap=self._uses - last[0] if last is not None else 0,
                identity=self._had_another_session(use) if first_of_user else None,
            )
        )
        for touched in keys:
            self._last.pop(touched, None)
            self._last[touched] = self._uses, use.at_s
        self._forget(use.at_s)

    def ratios(self, now_s: float | None = None) -> dict[str, float]:
        """By dimension, and the norm of those; one of which nothing is known in the window is left out."""
        if now_s is not None:
            self._forget(now_s)
        sums = {"temporal": self._temporal(), "identity": self._identity(), "topological": self._topological()}
        found = {
            name: sum(part for part, _ in parts) / whole
            for name, parts in sums.items()
            if (whole := sum(tokens for _, tokens in parts))
        }
        found |= self._spatial()
        return {name: found[name] for name in DIMENSIONS if name in found} | norm(found)

    def _temporal(self) -> list[tuple[float, int]]:
        uses = Counter(key for seen in self._recent for key in _keys(seen.use))
        return [
            (seen.use.hit_tokens * max(0.0, 1 - seen.gap * uses[seen.again] / len(self._recent)), seen.use.hit_tokens)
            for seen in self._recent
            if seen.again is not None
        ]

    def _identity(self) -> list[tuple[float, int]]:
        return [
            (seen.use.hit_tokens * seen.identity, seen.use.hit_tokens)
            for seen in self._recent
            if seen.identity is not None
        ]

    def _topological(self) -> list[tuple[float, int]]:
        return [
            (min(seen.use.near_tokens, seen.use.held_tokens), seen.use.held_tokens)
            for seen in self._recent
            if seen.use.near_tokens is not None and seen.use.held_tokens is not None
        ]

    def _spatial(self) -> dict[str, float]:
        prefixes: Counter[str | int] = Counter()
        for seen in self._recent:
            if seen.use.prefix != "":
                prefixes[seen.use.prefix] += seen.use.hit_tokens
        reused = sum(prefixes.values())
        return {"spatial": sum((tokens / reused) ** 2 for tokens in prefixes.values())} if reused else {}

    def _had_another_session(self, use: Use) -> bool:
        first = self._session_of.pop(use.user, None)
        other = first is not None and first != use.session
        self._session_of[use.user] = "" if other else use.session
        if len(self._session_of) > self._most_keys:
            self._session_of.popitem(last=False)
        return other

    def _forget(self, now_s: float) -> None:
        oldest = now_s - self._window_s
        while self._recent and self._recent[0].use.at_s < oldest:
            self._recent.popleft()
        while self._last and (len(self._last) > self._most_keys or next(iter(self._last.values()))[1] < oldest):
            self._last.popitem(last=False)


def _keys(use: Use) -> list[_Key]:
    keys: list[_Key] = [("session", use.session), ("prefix", use.prefix)]
    return [key for key in keys if key[1] != ""]


def norm(ratios: Mapping[str, float]) -> dict[str, float]:
    """The root mean square of the known dimensions; nothing where none is known."""
    known = [ratios[name] for name in DIMENSIONS if name in ratios]
    return {NORM: sqrt(sum(value * value for value in known) / len(known))} if known else {}
