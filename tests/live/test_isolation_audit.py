"""`prefixwatch audit isolation` on real vLLM engines: salted, unsalted, and with an outer tier that drops the salt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixwatch.engines.fleet import EngineHandle
from tests.live.conftest import engines_with_a_store
from tests.stack.command_line import prefixwatch

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]  # on a crowded machine engines take minutes to start

SALTS = ("--victim-salt", "random", "--attacker-salt", "random")


def audit(engine: EngineHandle, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the content of audit.json."""
    ended = prefixwatch(
        *("audit", "isolation", "--target", engine.url, "--engine", engine.url, "--out", str(out)),
        *("--pause", "0.05", "--rate", "100", *options),
    )
    assert ended.code in (0, 1, 3), ended.err
    document: dict[str, Any] = json.loads((out / "audit.json").read_text(encoding="utf-8"))["audit"]
    return ended.code, document


def states(document: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(each["test"], each["tier"]): each["state"] for each in document["findings"]}


@pytest.mark.parametrize("salted", [True, False])
def test_salts_isolate_and_without_them_tokens_and_time_show_the_leak(
    engines: list[EngineHandle], tmp_path: Path, salted: bool
) -> None:
    code, document = audit(engines[0], tmp_path, "--samples", "24", "--prompt-tokens", "768", *SALTS * salted)
    timing = next(each for each in document["findings"] if each["test"] == "timing")["figures"]
    assert timing["power"] >= 0.99
    decided = "isolated" if salted else "leak"
    by_chance = salted and timing["p_value"] < 0.01  # once in a hundred runs; never as low as a leak's
    overall = "inconclusive" if by_chance else decided
    assert states(document) == {
        ("tokens", "all"): decided,
        ("tokens", "gpu"): decided,
        ("tokens", "outer"): "unavailable",
        ("timing", "all"): overall,
    }
    assert (code, document["verdict"]) == ({"isolated": 0, "leak": 1, "inconclusive": 3}[overall], overall)
    assert document["price"]["hit_tokens"] >= 650
    assert document["price"]["seconds"] > 0


@pytest.fixture(scope="module")
def tiered(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHandle]:
    """An engine whose outer tier is keyed by tokens without the salt (vLLM's example connector)."""
    for (engine,) in engines_with_a_store(1, model_dir, tmp_path_factory.mktemp("tiered")):
        yield engine


def test_a_tier_that_drops_the_salt_is_found_and_the_gpu_tier_is_cleared(tiered: EngineHandle, tmp_path: Path) -> None:
    """sgl-project/sglang#37160, LMCache/LMCache#4825 (IS04)."""
    code, document = audit(tiered, tmp_path, "--samples", "6", "--prompt-tokens", "256", "--tests", "tokens", *SALTS)
    assert states(document) == {("tokens", "all"): "leak", ("tokens", "gpu"): "isolated", ("tokens", "outer"): "leak"}
    assert (code, document["verdict"]) == (1, "leak")
    assert document["statement"].startswith(
        "Leak: one tenant can see what another sent. Shown by: tokens (all tiers), "
    )
    assert "Isolated: tokens (GPU tier)." in document["statement"]
