"""Every query of every dashboard against a real Prometheus, with two real vLLM engines behind the router."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixwatch.engines.fleet import EngineHandle
from prefixwatch.engines.tiny_model import MODEL_NAME
from tests.stack.dashboard_stack import FEW, Engine, answered, faults, observed, short_folder, without_answer

pytestmark = [pytest.mark.vllm, pytest.mark.prometheus]


def _known(engines: list[EngineHandle]) -> list[Engine]:
    return [
        Engine(each.name, each.url, each.kv_events_endpoint, each.replay_endpoint, f"zone-{k}", f"node-{k}")
        for k, each in enumerate(engines)
    ]


async def test_every_query_has_an_answer_from_real_engines(engines: list[EngineHandle], model_dir: Path) -> None:
    with short_folder() as folder:
        async with observed(_known(engines), folder, model_dir, MODEL_NAME, engines[0].block_size) as running:
            outcomes = await answered(running, MODEL_NAME, rate_per_second=2.0)

    assert faults(outcomes) == []
    assert len(without_answer(outcomes)) < FEW
