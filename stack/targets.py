"""What a running OpenAI-compatible endpoint says of itself."""

from __future__ import annotations

import aiohttp

from stack.errors import UsageError

_TIMEOUT_SECONDS = 10.0


async def served_model(url: str) -> str:
    """The first model that the endpoint lists. Raises UsageError naming the endpoint and what it answered."""
    address = f"{url.rstrip('/').removesuffix('/v1')}/v1/models"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)) as session,
            session.get(address) as response,
        ):
            if response.status != 200:
                raise UsageError(f"--target: {address} answers {response.status}: is it an OpenAI-compatible endpoint?")
            models = (await response.json(content_type=None)).get("data", [])
    except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError) as error:
        why = str(error) or type(error).__name__
        raise UsageError(
            f"--target: {address} can't be read ({why}): start it first, or correct the address"
        ) from error
    if not models:
        raise UsageError(f"--target: {address} lists no model")
    return str(models[0]["id"])
