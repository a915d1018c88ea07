"""Data-quality flags as recording rules, where there is no exporter: those that follow from an engine's lifetime sums.

Each means what `exporters.scraping.quality` means by it, with its constants. A flag is 1 (raised), 0 (looked at, fine)
or absent (couldn't be looked at); recorded are those that are raised, and how many were looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prefixwatch.alerts.rule import RecordingRule
from prefixwatch.exporters.metrics_page.families import MIN_OBSERVATIONS
from prefixwatch.exporters.scraping.quality import (
    MISSING_OBSERVATIONS_RATIO,
    PLAUSIBLE_TTFT_SECONDS,
    WHOLE_ANSWER_RATIO,
    WHOLE_ANSWER_TOKENS,
)


def flag_records(fleet: Sequence[str]) -> list[RecordingRule]:
    """`prefixwatch_data_quality` and `prefixwatch_data_quality_checks`, over the families of `records`."""
    worker = ", ".join((*fleet, "model", "target"))
    looked_at = "\nor ".join(
        f'label_replace({expr}, "flag", "{flag}", "", "")' for flag, expr in _flags(worker).items()
    )
    by_fleet = f"by ({', '.join(fleet)}) " if fleet else ""
    return [
        RecordingRule("prefixwatch_data_quality", f"({looked_at}) == 1", {}),
        RecordingRule("prefixwatch_data_quality_checks", f"count {by_fleet}({looked_at})", {}),
    ]


def _flags(worker: str) -> Mapping[str, str]:
    on = f"on ({worker})"

    def total(series: str) -> str:
        return f"sum by ({worker}) ({series})"

    def observed(histogram: str) -> str:
        return f"({total(f'prefixwatch_engine_{histogram}_seconds_count')} >= {MIN_OBSERVATIONS})"

    def mean(histogram: str) -> str:
        return f"{total(f'prefixwatch_engine_{histogram}_seconds_sum')} / {on} {observed(histogram)}"

    hits, queries = total("prefixwatch_prefix_hit_tokens_total"), total("prefixwatch_prefix_query_tokens_total")
    finished = f"({total('prefixwatch_engine_finished_requests_total')} >= {MIN_OBSERVATIONS})"
    first_tokens = total("prefixwatch_engine_ttft_seconds_count")
    long_answers = f"{total('prefixwatch_engine_generation_tokens_total')} / {on} {finished} > {WHOLE_ANSWER_TOKENS}"
    return {
        "missing_family": (
            f"max by ({worker}) (prefixwatch_missing_signal)\n"
            f"or {on} 0 * max by ({worker}) (prefixwatch_target_up == 1)"
        ),
        "impossible_ratio": f"{hits} > bool {on} ({queries} > 0)",
        "missing_observations": (
            f"({finished} - {on} {first_tokens}) / {on} {finished} > bool {MISSING_OBSERVATIONS_RATIO}"
        ),
        "ttft_is_whole_answer": (
            f"(({mean('ttft')}) / {on} ({mean('e2e')}) > bool {WHOLE_ANSWER_RATIO}) and {on} ({long_answers})"
        ),
        "ttft_without_queue": f"({mean('queue')}) > bool {on} ({mean('ttft')})",
        "implausible_latency": f"{mean('ttft')} < bool {PLAUSIBLE_TTFT_SECONDS}",
    }
