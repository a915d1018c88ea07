"""Shared by the engines' tests: the tiny model's folder, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixwatch.engines.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: all that a simulated engine needs."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
