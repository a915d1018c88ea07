"""Which engines' caches hold nothing but what this router sent: those that had served nobody when it first saw them.

What an engine served before is in its cache still, so reuse of it proves nothing. An engine found cold stays so: after
its own restart it begins empty again.
"""

from __future__ import annotations

import re

import aiohttp

from prefixwatch.router.bounded import TooLong, read_at_most
from prefixwatch.router.tenant_config import IsolationConfig

_PAGE_BYTES = 16 * 2**20
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_PROMPT_TOKENS = re.compile(rb"^(?:vllm|sglang|llamacpp):prompt_tokens_total(?:\{[^}]*\})? (\S+)", re.MULTILINE)


def served_nothing(metrics: bytes) -> bool:
    """Whether an engine's metrics say that it has not computed a prompt yet."""
    counts = [float(count) for count in _PROMPT_TOKENS.findall(metrics)]
    return bool(counts) and not any(counts)


class ColdEngines:
    """Asks each engine when it comes up."""

    def __init__(self, config: IsolationConfig) -> None:
        self._answer = config.caches_at_start
        self._cold: set[str] = set()
        self._asks = config.remember and config.caches_at_start == "ask"

    def __call__(self, worker: str) -> bool:
        """Whether all that it caches came through this router."""
        return self._answer == "empty" or worker in self._cold

    async def ask(self, worker: str, url: str, session: aiohttp.ClientSession) -> None:
        """Read its metrics, unless it is known to be cold; one that doesn't answer isn't taken for cold."""
        if not self._asks or worker in self._cold:
            return
        try:
            async with session.get(f"{url}/metrics", timeout=_TIMEOUT) as answer:
                if answer.status == 200 and served_nothing(await read_at_most(answer.content, _PAGE_BYTES)):
                    self._cold.add(worker)
        except (aiohttp.ClientError, TimeoutError, TooLong, ValueError):
            return
