"""Tables of measured step times: interpolation, growth while decoding, and the shipped profiles."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.documents import DocumentError
from prefixwatch.engines.errors import EngineError
from prefixwatch.engines.model import hardware
from prefixwatch.engines.model.profiles import profile, profiles
from prefixwatch.engines.model.step_table import Grid, StepTable
from prefixwatch.engines.model.step_time import StepTimeError

GRID = Grid((1, 10), (0, 100, 200), ((1, 2, 6), (10, 20, 30)))


def test_a_grid_is_exact_at_its_points_and_bilinear_between() -> None:
    assert (GRID.at(1, 100), GRID.at(10, 200)) == (2, 30)
    assert GRID.at(5.5, 50) == pytest.approx((1.5 + 15) / 2)
    assert GRID.at(1, 300) == 10, "beyond its end it goes on as in its last interval"
    assert GRID.at(-100, 0) == 1, "never below its smallest value"


@pytest.mark.parametrize(
    ("rows", "columns", "values", "message"),
    [
        ((1,), (0, 1), ((1, 2),), "rows must be at least two ascending numbers"),
        ((1, 1), (0, 1), ((1, 2), (3, 4)), "rows must be at least two ascending numbers"),
        ((-1, 1), (0, 1), ((1, 2), (3, 4)), "rows must be at least two ascending numbers from 0 on"),
        ((1, 2), (0, float("inf")), ((1, 2), (3, 4)), "columns must be at least two ascending numbers"),
        ((1, 2), (0, float("nan"), 1), ((1, 2, 3), (4, 5, 6)), "columns must be at least two ascending numbers"),
        ((1, 2), (0, 1), ((1, 2),), "values must be 2 rows of 2 numbers"),
        ((1, 2), (0, 1), ((1, 2), (3, 0)), "finite numbers above 0"),
        ((1, 2), (0, 1), ((1, 2), (3, float("nan"))), "finite numbers above 0"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(rows: Any, columns: Any, values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(rows, columns, values)


@given(sequences=st.integers(1, 300), length=st.integers(1, 70_000))
def test_decode_steps_grow_as_the_table_says_until_its_next_column(sequences: int, length: int) -> None:
    table = profile("h100-llama-8b").step_time
    assert isinstance(table, StepTable)
    growth_s, alike = table.decode_growth_s(sequences, sequences * length)
    first_s = table.duration_s(decode_sequences=sequences, context_tokens=sequences * length)
    for step in {1, 2, int(min(alike, 500))} - {0}:
        if step <= alike:
            later = table.duration_s(decode_sequences=sequences, context_tokens=sequences * (length + step))
            assert first_s + step * growth_s == pytest.approx(later, rel=1e-9)


def test_a_step_that_prefills_and_decodes_reads_the_weights_once() -> None:
    table = profile("h100-llama-8b").step_time
    prefill_s = table.duration_s(2048, 2048 * 2047 / 2, 1)
    decode_s = table.duration_s(decode_sequences=32, context_tokens=32 * 1024)
    alone_s = table.duration_s(decode_sequences=1, context_tokens=1)
    both_s = table.duration_s(2048, 2048 * 2047 / 2, 1, 32, 32 * 1024)
    assert both_s == pytest.approx(prefill_s + decode_s - alone_s)


def test_the_h100_profile_has_the_measured_figures() -> None:
    """aiconfigurator-core 0.12, h100_sxm, Llama-3.1-8B, vLLM: misses, half and full hits; decode steps."""
    h100 = profile("h100-llama-8b")
    prefill = [h100.step_time.prefill_s(2048, cached, 8192) * 1e3 for cached in (0, 1024, 2032)]
    assert prefill == [pytest.approx(43.5, rel=0.01), pytest.approx(23.1, rel=0.01), pytest.approx(6.8, rel=0.02)]
    shapes = [(1, 1024), (32, 1024), (32, 8192), (128, 8192)]
    decode = [h100.step_time.duration_s(decode_sequences=b, context_tokens=b * c) * 1e3 for b, c in shapes]
    assert decode == [pytest.approx(each, rel=0.01) for each in (6.2, 8.3, 17.7, 50.6)]
    assert (h100.capacity_blocks, h100.block_size) == (27_062, 16)


def test_every_profile_says_what_was_measured_and_what_is_assumed() -> None:
    assert {"assumed-gpu", "h100-llama-8b", "a100-llama-8b", "l40s-llama-8b", "h200x4-llama-70b"} <= set(profiles())
    for found in profiles().values():
        assert found.measured
        assert found.assumed


def test_a_profile_of_ones_own_is_a_file(tmp_path: Path) -> None:
    shipped = Path(hardware.__file__).parents[1] / "profiles/l40s-llama-8b.yaml"
    text = shipped.read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    assert profile(str(tmp_path / "mine.yaml")).step_time == profile("l40s-llama-8b").step_time

    (tmp_path / "bad.yaml").write_text(text.replace("capacity_blocks", "capacity_block"), encoding="utf-8")
    with pytest.raises(DocumentError, match=r"bad.yaml:\d+: capacity_block: unknown key: did you mean"):
        profile(str(tmp_path / "bad.yaml"))
    (tmp_path / "negative.yaml").write_text(text.replace("  - [", "  - [-", 1), encoding="utf-8")
    with pytest.raises(StepTimeError, match="profile negative: prefill_ms: values must be"):
        profile(str(tmp_path / "negative.yaml"))


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.startswith("aiconfigurator_core"):
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EngineError, match=r"pip install 'prefixwatch\[hardware\]'"):
        hardware.tabulate("h100_sxm", "meta-llama/Meta-Llama-3.1-8B", "vllm")
