"""How engines name cached blocks: with an algorithm whose collisions nobody can make, or not.

Where several tenants share an engine, a block of one that collides with another's is served as that other's KV. vLLM
shows its algorithm in `vllm:cache_config_info`. Its seed (`PYTHONHASHSEED`, random by default) is on no page.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import aiohttp

from prefixwatch.stack.config import PrefixwatchConfig

_ALGORITHM = re.compile(r'prefix_caching_hash_algo="([^"\n]{1,40})"')
_CRYPTOGRAPHIC = ("sha256", "sha512", "sha3", "blake2", "blake3")
_TIMEOUT_SECONDS = 10.0
_PAGE_BYTES = 2**24


async def hash_algorithms(config: PrefixwatchConfig) -> dict[str, str]:
    """By engine of `fleet.targets`, the algorithm that it names; empty where it names none, or can't be asked."""

    async def ask(session: aiohttp.ClientSession, url: str) -> str:
        try:
            async with session.get(f"{url}/metrics") as answer:
                page = (await answer.content.read(_PAGE_BYTES)).decode("utf-8", "replace")
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return ""
        found = _ALGORITHM.search(page)
        return found[1] if found else ""

    workers = config.fleet.targets
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)) as session:
        algorithms = await asyncio.gather(*(ask(session, worker.url) for worker in workers))
    return {worker.name: algorithm for worker, algorithm in zip(workers, algorithms, strict=True)}


def judge_hashing(algorithms: Mapping[str, str], *, several_tenants: bool) -> tuple[bool | None, str]:
    """Whether the hashing is safe for tenants, None if that can't be known; and the evidence."""
    if not algorithms:
        return None, "needs --config with fleet.targets"
    used = ", ".join(sorted({algorithm for algorithm in algorithms.values() if algorithm})) or "unknown"
    if not several_tenants:
        return True, f"one tenant, whose blocks collide with nobody else's ({used})"
    weak = {name: algorithm for name, algorithm in algorithms.items() if algorithm and not _is_strong(algorithm)}
    if weak:
        named = ", ".join(f"{name} ({algorithm})" for name, algorithm in weak.items())
        return False, f"anybody can make blocks collide at {named}: vLLM takes --prefix-caching-hash-algo sha256"
    silent = [name for name, algorithm in algorithms.items() if not algorithm]
    if silent:
        return None, f"these don't say how they hash blocks: {', '.join(silent)}"
    seed = "the seed is on no page: leave PYTHONHASHSEED unset, or keep it secret"
    return True, f"all {len(algorithms)} engines use {used}; {seed}"


def _is_strong(algorithm: str) -> bool:
    return algorithm.lower().startswith(_CRYPTOGRAPHIC)
