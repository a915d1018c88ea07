"""Each number that a state machine or a price is set by says what moves when it is turned."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from prefixwatch.exporters.scaling.config import ScalingSettings
from prefixwatch.loadgen.scenario.cache_section import Cache
from prefixwatch.loadgen.scenario.moves_section import Moves
from prefixwatch.router.config import CacheViewConfig, HealthConfig, MovesConfig, SplitConfig, TimeoutsConfig
from prefixwatch.router.degradation.config import DegradationConfig
from prefixwatch.router.tenant_config import FairnessConfig

SECTIONS: tuple[type[BaseModel], ...] = (
    *(DegradationConfig, MovesConfig, SplitConfig, HealthConfig, TimeoutsConfig, CacheViewConfig, FairnessConfig),
    *(ScalingSettings, Cache, Moves),
)
TURNED = re.compile(
    r"\b(?:higher|lower|more|fewer|longer|shorter|larger|smaller|faster|slower|another)\b[^.;:]*:", re.IGNORECASE
)
UNTURNED = {"TimeoutsConfig.startup_seconds": "it ends the start-up alone"}


def knobs() -> Iterator[tuple[str, str]]:
    """Each number of these sections, as `Section.key`, and what the reference says of it."""
    for section in SECTIONS:
        for key, field in section.model_fields.items():
            if re.search(r"\b(?:int|float)\b", str(field.annotation)):
                yield f"{section.__name__}.{key}", field.description or ""


def test_the_sections_have_the_numbers_that_are_meant() -> None:
    assert len(dict(knobs())) > 50


@pytest.mark.parametrize(("name", "text"), [pytest.param(name, text, id=name) for name, text in knobs()])
def test_a_knob_says_what_moves_when_it_is_turned(name: str, text: str) -> None:
    assert (TURNED.search(text) is not None) is (name not in UNTURNED), f"{name}: {text}"
