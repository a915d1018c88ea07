"""Each dimension by its definition, its bounds, and what it doesn't depend on."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from math import e, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.kvcache.locality import Locality, Use, norm


def ratios(*uses: Use) -> dict[str, float]:
    locality = Locality()
    for use in uses:
        locality.add(use)
    return locality.ratios()


USES = st.lists(
    st.builds(
        Use,
        at_s=st.just(0.0),
        hit_tokens=st.integers(0, 1000),
        session=st.sampled_from(["", "a", "b", "c"]),
        user=st.sampled_from(["", "u", "v"]),
        prefix=st.sampled_from(["", "p", "q", 7]),
        held_tokens=st.none() | st.integers(0, 1000),
        near_tokens=st.none() | st.integers(0, 2000),
    ),
    max_size=40,
)


@given(USES)
def test_every_dimension_and_the_norm_lie_between_0_and_1(uses: list[Use]) -> None:
    found = ratios(*uses)
    assert all(0.0 <= value <= 1.0 + 1e-12 for value in found.values())
    known = [value for name, value in found.items() if name != "norm"]
    assert found.get("norm", 0.0) == pytest.approx(sqrt(np.mean(np.square(known))) if known else 0.0)


@given(USES, st.floats(0.001, 1000))
def test_no_dimension_depends_on_the_speed_of_the_traffic(uses: list[Use], spacing: float) -> None:
    assert ratios(*uses) == ratios(*(replace(use, at_s=k * spacing) for k, use in enumerate(uses)))


def test_temporal_is_one_over_e_at_random_nothing_in_turn_and_nearly_all_back_to_back() -> None:
    keys, rng = 50, np.random.default_rng(1)
    drawn = rng.integers(0, keys, 40_000).tolist()
    assert ratios(*(Use(0, 1, prefix=f"p{k}") for k in drawn))["temporal"] == pytest.approx(1 / e, abs=0.01)
    assert ratios(*(Use(0, 1, prefix=f"p{k % keys}") for k in range(5_000)))["temporal"] == 0.0
    bursts = [k // 100 for k in range(5_000)]
    assert ratios(*(Use(0, 1, prefix=f"p{k}") for k in bursts))["temporal"] == pytest.approx(1 - 1 / keys)


def test_temporal_does_not_depend_on_how_popular_prefixes_are() -> None:
    rng = np.random.default_rng(2)
    drawn = rng.choice(20, 40_000, p=np.arange(1, 21) / 210).tolist()
    assert ratios(*(Use(0, 1, prefix=f"p{k}") for k in drawn))["temporal"] == pytest.approx(1 / e, abs=0.02)


@pytest.mark.parametrize("prefixes", [1, 4, 16])
def test_spatial_is_the_chance_to_meet_the_same_prefix(prefixes: int) -> None:
    assert ratios(*(Use(0, 10, prefix=k) for k in range(prefixes)))["spatial"] == pytest.approx(1 / prefixes)


def test_identity_is_the_share_of_users_who_came_back() -> None:
    uses = [Use(0, 10, session=f"s{k}", user=f"u{k % 5}") for k in range(20)]
    assert ratios(*uses)["identity"] == 15 / 20
    again = [Use(0, 10, session="s0", user="u0") for _ in range(10)]
    assert ratios(*again)["identity"] == 0.0  # one session's later requests are no other session


def test_topological_is_what_was_held_where_the_request_went() -> None:
    uses = [Use(0, 0, held_tokens=100, near_tokens=100), Use(0, 0, held_tokens=300, near_tokens=0)]
    assert ratios(*uses)["topological"] == 0.25
    assert "topological" not in ratios(Use(0, 5, held_tokens=100))


def test_the_window_forgets_uses_and_keys() -> None:
    locality = Locality(window_s=10.0)
    for at_s, prefix in ((0.0, "p"), (1.0, "p"), (20.0, "q"), (21.0, "q")):
        locality.add(Use(at_s, 10, prefix=prefix))
    assert locality.ratios(21.0)["spatial"] == 1.0
    assert locality.ratios(40.0) == {}


def test_most_uses_and_keys_bound_what_is_kept() -> None:
    locality = Locality(most_keys=3, most_uses=2)
    for k in range(100):
        locality.add(Use(0.0, 1, session=f"s{k}", user=f"u{k}", prefix=k))
    assert locality.ratios()["spatial"] == 0.5


class Plain:
    """The definitions, computed from all uses of the window at every question, in fractions."""

    def __init__(self, window_s: float, most_uses: int) -> None:
        self.window_s, self.most_uses = window_s, most_uses
        self.last: dict[tuple[str, str | int], tuple[int, float]] = {}
        self.sessions: dict[str, set[str]] = {}
        self.window: list[tuple[Use, tuple[str, str | int] | None, int, bool | None]] = []
        self.added = 0

    def add(self, use: Use) -> None:
        self.added += 1
        keys = keys_of(use)
        later = bool(use.session) and ("session", use.session) in self.last
        key = ("session", use.session) if later else ("prefix", use.prefix)
        again = key if use.hit_tokens and key in self.last else None
        others: bool | None = None
        if use.user and use.session and not later:
            of_user = self.sessions.setdefault(use.user, set())
            others = bool(of_user - {use.session})
            of_user.add(use.session)
        gap = self.added - self.last[again][0] if again else 0
        self.window.append((use, again, gap, others))
        self.last |= dict.fromkeys(keys, (self.added, use.at_s))
        self.forget(use.at_s)

    def forget(self, now_s: float) -> None:
        self.last = {key: last for key, last in self.last.items() if last[1] >= now_s - self.window_s}

    def ratios(self, now_s: float) -> dict[str, float]:
        self.forget(now_s)
        self.window = [each for each in self.window if each[0].at_s >= now_s - self.window_s][-self.most_uses :]
        counted = Counter(key for use, *_ in self.window for key in keys_of(use))
        prefixes: Counter[str | int] = Counter()
        parts: dict[str, list[tuple[Fraction, int]]] = {"temporal": [], "identity": [], "topological": []}
        for use, again, gap, others in self.window:
            if use.prefix != "":
                prefixes[use.prefix] += use.hit_tokens
            if again is not None:
                soon = max(Fraction(0), 1 - Fraction(gap * counted[again], len(self.window)))
                parts["temporal"].append((use.hit_tokens * soon, use.hit_tokens))
            if others is not None:
                parts["identity"].append((Fraction(use.hit_tokens * others), use.hit_tokens))
            if use.held_tokens is not None and use.near_tokens is not None:
                parts["topological"].append((Fraction(min(use.near_tokens, use.held_tokens)), use.held_tokens))
        found = {
            name: float(sum(part for part, _ in of) / whole)
            for name, of in parts.items()
            if (whole := sum(tokens for _, tokens in of))
        }
        if reused := sum(prefixes.values()):
            found["spatial"] = float(sum(Fraction(tokens, reused) ** 2 for tokens in prefixes.values()))
        return found | norm(found)


def keys_of(use: Use) -> list[tuple[str, str | int]]:
    return [key for key in (("session", use.session), ("prefix", use.prefix)) if key[1] != ""]


@given(USES, st.lists(st.integers(0, 8), min_size=40, max_size=40), st.integers(1, 60))
def test_the_running_sums_are_those_of_the_window(uses: list[Use], pauses: list[int], most_uses: int) -> None:
    """After every use and every pause, with uses that leave by age and by number, and keys that are forgotten."""
    running, plain, now_s = Locality(20.0, most_uses=most_uses), Plain(20.0, most_uses), 0.0
    for use, pause in zip(uses, pauses, strict=False):
        for locality in (running, plain):
            locality.add(replace(use, at_s=now_s))
        now_s += pause
        assert running.ratios(now_s) == plain.ratios(now_s)


def test_a_long_window_that_slides_keeps_its_sums() -> None:
    rng = np.random.default_rng(3)
    running, plain = Locality(50.0, most_uses=1500), Plain(50.0, 1500)
    for k, key in enumerate((rng.zipf(1.3, 4_000) % 100).tolist()):
        session = f"s{k % 97}-{key % 3}"
        use = Use(k / 50, int(rng.integers(0, 5000)), session=session, user=f"u{key % 40}", prefix=key)
        running.add(use)
        plain.add(use)
    assert running.ratios(80.0) == plain.ratios(80.0)
    assert {"temporal", "spatial"} <= set(running.ratios(80.0))
    assert running.ratios(1000.0) == plain.ratios(1000.0) == {}
