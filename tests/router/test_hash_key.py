"""A router whose index knows blocks by their hashes under a key: it serves as before, its records name no blocks."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from prefixwatch.router.config import RouterConfig
from tests.router.conftest import Start
from tests.router.fake_engine import FakeEngine
from tests.router.test_request_log import AUDITED, TEXT, answering, page

KEY = "a secret of at least 32 characters"


@pytest.mark.parametrize("key", [None, KEY])
async def test_predictions_and_own_tokens_are_the_same_under_a_key(
    start: Start, engines: list[FakeEngine], key: str | None
) -> None:
    client = await start(engines[:1], cache_view={"source": "history", "hash_key": key}, **AUDITED)
    for tenant, text, cached in (
        ("acme", TEXT, 0),
        ("acme", TEXT, 80),
        ("bolt", TEXT, 80),
        ("acme", f"y{TEXT[1:]}", 0),
    ):
        engines[0].behaviour = answering(cached)
        async with client.chat(text, headers={"x-tenant-id": tenant}) as answer:
            await answer.read()
            assert answer.status == 200
    records = (await page(client)).records
    assert [(each.predicted_tokens, each.own_tokens) for each in records] == [(0, 0), (80, 80), (80, 0), (0, 0)]
    assert [each.finding for each in records] == ["", "", "tenant_without_salt", "tenant_without_salt"]
    named = [bool(each.prompt_block or each.reused_block or each.marks) for each in records]
    assert named == [key is None] * 4
    assert KEY not in str(client.router.config)


def test_a_key_that_could_be_guessed_is_refused() -> None:
    with pytest.raises(ValidationError, match="at least 32 items"):
        RouterConfig.model_validate(
            {"workers": [{"name": "w", "url": "http://w"}], "cache_view": {"hash_key": "too short"}}
        )
