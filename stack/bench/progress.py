"""How far a bench is, on a terminal; one line a run where there is none."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from prefixwatch.stack.bench.schedule import Run


class Progress:
    """Shows the run at work and leaves one line for each that ended."""

    def __init__(self, console: Console, runs: int) -> None:
        self._console = console
        self._runs = runs
        self._run: Run | None = None
        self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def begin(self, run: Run) -> None:
        self._run = run
        self._live.update(Text(f"{self._head()} starting …"))

    def update(self, state: dict[str, Any]) -> None:
        """A line of the load generator's progress."""
        bad = sum(state[key] for key in ("refused", "failed", "timed_out", "cut_off"))
        text = (
            f"{self._head()} {state['phase']}: {state['sent']}/{state['planned']} sent, "
            f"{state['completed']} completed, {bad} bad, TTFT p95 {_ms(state['ttft_p95_ms'])}"
        )
        self._live.update(Text(text))

    def end(self, report: dict[str, Any]) -> None:
        """A run ended; `report` is its run.json."""
        counts = report["counts"]
        bad = counts["planned"] - counts["completed"]
        line = Text(f"{self._head()} {counts['completed']} completed, {bad} bad")
        if not report["valid"]:
            line.append("  not valid: " + "; ".join(report["reasons"]), style="yellow")
        self._console.print(line, soft_wrap=True)

    def _head(self) -> str:
        assert self._run is not None
        return f"run {self._run.position}/{self._runs}  {self._run.policy}  repeat {self._run.repeat + 1}:"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} ms"
