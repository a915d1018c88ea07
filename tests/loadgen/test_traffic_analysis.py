from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.kvcache.blocks import block_hashes
from prefixwatch.loadgen.recordings.analysis import SeenPrompt, analyze, sampled_windows

RNG = np.random.default_rng(7)
SYSTEM, DOCUMENT = (RNG.integers(0, 50_000, 640, dtype=np.uint32) for _ in range(2))


def own(count: int) -> np.ndarray:
    return RNG.integers(0, 50_000, count, dtype=np.uint32)


def prompt(*texts: np.ndarray, session: str = "", namespace: str = "") -> SeenPrompt:
    tokens = np.concatenate(texts)
    return SeenPrompt(0.0, namespace, session, len(tokens), block_hashes(tokens), tokens)


def test_what_opens_alike_could_hit() -> None:
    found = analyze([prompt(SYSTEM, own(160), session=str(k)) for k in range(5)], 16)
    assert (found.requests, found.sessions, found.prompt_tokens) == (5, 5, 5 * 800)
    assert found.hit_tokens == 4 * 640
    assert found.hit_tokens_in_session == 0
    assert found.lost_tokens == 0
    assert found.parting["256-1023"] == 4
    (top,) = found.top_prefixes
    assert (top.tokens, top.requests, top.saved_tokens) == (640, 5, 4 * 640)


def test_a_field_in_front_breaks_all_that_follows_and_is_pointed_at() -> None:
    found = analyze([prompt(own(8), SYSTEM) for _ in range(5)], 16, lambda ids: f"<{len(ids)}>")
    assert found.hit_tokens == 0
    assert found.lost_tokens == pytest.approx(4 * 640, rel=0.35)
    (point,) = found.parting_points
    assert (point.at_token, point.requests, point.text) == (0, 4, "<0>⟂<8>")


def test_documents_in_another_order_are_lost_reuse_although_they_moved() -> None:
    found = analyze(
        [prompt(SYSTEM, DOCUMENT[:320], DOCUMENT[320:]), prompt(SYSTEM, DOCUMENT[320:], DOCUMENT[:320])], 16
    )
    assert found.hit_tokens == 640
    assert found.parting_points[0].at_token == 640
    assert found.lost_tokens == pytest.approx(640, rel=0.35)


def test_a_session_hits_what_it_sent_itself() -> None:
    turns = [prompt(SYSTEM, DOCUMENT[: 160 * k], session="a") for k in range(1, 4)]
    found = analyze([*turns, prompt(SYSTEM, session="b")], 16)
    assert found.hit_tokens == (640 + 160) + (640 + 320) + 640
    assert found.hit_tokens_in_session == found.hit_tokens - 640


def test_namespaces_share_nothing() -> None:
    tokens = np.concatenate([SYSTEM])
    prompts = [
        SeenPrompt(0.0, name, "", len(tokens), block_hashes(tokens, root=root), tokens)
        for name, root in (("a", 1), ("b", 2))
    ]
    found = analyze(prompts, 16)
    assert (found.hit_tokens, found.lost_tokens) == (0, 0)


def test_without_texts_what_breaks_reuse_is_not_known() -> None:
    prompts = [SeenPrompt(0.0, "", str(k), 1000, np.array([0, k + 1], dtype=np.uint64)) for k in range(3)]
    found = analyze(prompts, 512)
    assert (found.hit_tokens, found.lost_tokens, found.parting_points) == (1024, None, [])
    assert found.as_json()["capacity_blocks_for"]["100%"] == 1  # the block they share was touched last


def test_the_curve_grows_to_what_a_cache_without_limit_reuses() -> None:
    prompts = [prompt(SYSTEM[:320], own(64)) for _ in range(30)] + [prompt(DOCUMENT, own(64)) for _ in range(30)]
    found = analyze(prompts, 16)
    ratios = [ratio for _, ratio in found.curve]
    assert ratios == sorted(ratios)
    assert ratios[-1] == found.profile.hit_ratio()


def test_no_traffic_has_no_figures() -> None:
    found = analyze([], 16)
    assert (found.requests, found.seconds, found.curve, found.lost_tokens) == (0, None, [], None)
    assert found.as_json()["infinite_cache"]["hit_ratio"] is None


@given(st.integers(0, 200), st.integers(0, 200))
def test_windows_are_the_same_wherever_the_text_stands(before: int, after: int) -> None:
    inside = set(sampled_windows(SYSTEM)[1].tolist())
    moved = set(sampled_windows(np.concatenate([own(before), SYSTEM, own(after)]))[1].tolist())
    assert inside <= moved
    assert len(inside) == pytest.approx(640 / 16, rel=0.6)
