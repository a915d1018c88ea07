"""Marks each run on Grafana: a region on every dashboard that shows annotations with the tag `prefixwatch`.

The region begins with the run and gets its end and its result afterwards, by Grafana's annotations API: POST
/api/annotations (`time`, `tags`, `text`), then PATCH /api/annotations/ID (`timeEnd`, `text`); times in Unix
milliseconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp

from prefixwatch.loadgen.scenario.secrets import bearer
from prefixwatch.stack.bench.schedule import Run
from prefixwatch.stack.errors import UsageError

_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
TAGS = ("prefixwatch", "bench")


class GrafanaMark:
    """Raises UsageError where Grafana can't be reached, or refuses; before a run, so that nothing is lost."""

    def __init__(self, url: str, token_env: str, scenario: str, say: Callable[[str], None]) -> None:
        """`token_env` names the environment variable with a service account's token; `say` prints a warning."""
        self._url = f"{url.rstrip('/')}/api/annotations"
        self._headers = bearer(token_env)
        self._scenario = scenario
        self._say = say

    @contextlib.asynccontextmanager
    async def around(self, run: Run) -> AsyncIterator[Callable[[Mapping[str, Any]], None]]:
        """The region of a run. What it yields takes the run's run.json, for the text."""
        what = f"{self._scenario}, {run.policy}, repeat {run.repeat + 1}"
        results: list[str] = []

        def ended(report: Mapping[str, Any]) -> None:
            counts = report["counts"]
            valid = "" if report["valid"] else "; not valid"
            results.append(f": {counts['completed']} of {counts['planned']} completed{valid}")

        async with aiohttp.ClientSession(timeout=_TIMEOUT, headers=self._headers) as session:
            tags = [*TAGS, f"scenario:{self._scenario}", f"policy:{run.policy}"]
            body = {"time": _now_ms(), "tags": tags, "text": f"prefixwatch bench: {what}"}
            made = await self._ask(session, "POST", self._url, body)
            if not isinstance(made, dict) or "id" not in made:
                raise UsageError(f"--grafana: {self._url} makes no annotation: is it Grafana's address?")
            number = made["id"]
            try:
                yield ended
            finally:
                text = f"prefixwatch bench: {what}{''.join(results) or ': stopped'}"
                try:
                    await self._ask(session, "PATCH", f"{self._url}/{number}", {"timeEnd": _now_ms(), "text": text})
                except UsageError as error:  # the run is worth more than its mark
                    self._say(str(error))

    async def _ask(self, session: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any]) -> Any:
        try:
            async with session.request(method, url, json=body) as response:
                if response.status in (401, 403):
                    raise UsageError(
                        f"--grafana: {url} answers {response.status}: name the environment variable with a token that "
                        "may write annotations as --grafana-token-env"
                    )
                if response.status != 200:
                    raise UsageError(f"--grafana: {url} answers {response.status}: is it Grafana's address?")
                return await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise UsageError(f"--grafana: {url} can't be reached ({error or 'no answer in time'})") from error


def _now_ms() -> int:
    return round(time.time() * 1e3)
