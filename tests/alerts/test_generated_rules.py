"""Rules of forms that no shipped SLO has, under real promtools: calendar windows, time slices, native histograms."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefixwatch.alerts.build import slo_file
from prefixwatch.alerts.catalogue.model import load_catalogue
from prefixwatch.alerts.rule import text
from prefixwatch.alerts.settings import RuleSettings
from prefixwatch.slo.build import load_slos
from prefixwatch.slo.read import SHIPPED
from prefixwatch.slo.sloth import specifications
from tests.alerts.promtools import ends
from tests.needs import need

pytestmark = pytest.mark.prometheus

PROMTOOLS = ends() or {"none": "promtool"}
SESSION = (SHIPPED / "session-hit-rate.yaml").read_text(encoding="utf-8")
MISS_COST = (SHIPPED / "miss-cost.yaml").read_text(encoding="utf-8")
HITS, PROMPTS = "prefixwatch_session_hit_tokens_total", "prefixwatch_session_prompt_tokens_total"

every_promtool = pytest.mark.parametrize("promtool", PROMTOOLS.values(), ids=PROMTOOLS)


def expect(
    promtool: str,
    folder: Path,
    document: str,
    series: dict[str, str],
    values: list[tuple[str, str, float | None]],
    *,
    every: str = "1m",
) -> None:
    """Rules of `document` over `series`, a sample a minute, evaluated every so often: each (expression, time) has
    the value, or none."""
    (folder / "own.yaml").write_text(document)
    [slo] = load_slos([folder / "own.yaml"])
    rules = slo_file(slo, load_catalogue(), RuleSettings())
    (folder / "rules.yaml").write_text(text(rules))
    case: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": name, "values": samples} for name, samples in series.items()],
        "promql_expr_test": [
            {
                "expr": f"round(sum({expr}), 0.001)",
                "eval_time": at,
                "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
            }
            for expr, at, value in values
        ],
    }
    document_of_tests = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": every,
        "group_eval_order": [group.name for group in rules.groups],  # else at random
        "tests": [case],
    }
    (folder / "tests.yaml").write_text(yaml.safe_dump(document_of_tests))
    checked = subprocess.run(
        [promtool, "check", "rules", "--lint=all", "--lint-fatal", "rules.yaml"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
    done = subprocess.run(
        [promtool, "test", "rules", "tests.yaml"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@every_promtool
def test_a_calendar_budget_starts_anew_with_its_period(promtool: str, tmp_path: Path) -> None:
    """Days: the first all bad, the second all good. An hour into the second the budget is whole again."""
    calendar = "isRolling: false\n      calendar:\n        startTime: '1970-01-01'\n        timeZone: UTC"
    document = SESSION.replace("duration: 30d", "duration: 1d").replace("isRolling: true", calendar)
    series = {PROMPTS: "0+1000x1500", HITS: "0x1439 0+1000x61"}

    expect(
        promtool,
        tmp_path,
        document,
        series,
        [
            ("prefixwatch:slo_bad_ratio:increase_period", "23h58m", 1),
            ("prefixwatch:slo_error_budget_remaining:ratio", "23h58m", -5.667),
            ("prefixwatch:slo_bad_ratio:increase_period", "24h58m", 0),
            ("prefixwatch:slo_period_start:timestamp_seconds", "25h", 86_400),
        ],
    )


@every_promtool
def test_a_time_slice_is_one_event_whatever_its_traffic(promtool: str, tmp_path: Path) -> None:
    """An hour of 12 slices: in 3 of them, the busiest, half of the tokens miss."""
    document = SESSION.replace("Occurrences", "Timeslices").replace(
        "- target: 0.85", "- target: 0.95\n      timeSliceTarget: 0.9\n      timeSliceWindow: 5m"
    )
    series = {PROMPTS: "0+10x45 450+1000x75", HITS: "0+10x45 450+500x15 7950+1000x60"}

    expect(
        promtool,
        tmp_path,
        document,
        series,
        [
            ("prefixwatch:slo_total_events:increase1h", "61m", 12),
            ("prefixwatch:slo_bad_events:increase1h", "61m", 3),
            ("prefixwatch:slo_bad_ratio:increase1h", "61m", 0.25),
        ],
    )


@every_promtool
def test_a_slice_without_any_good_event_is_bad_before_the_good_counter_exists(promtool: str, tmp_path: Path) -> None:
    """A label such as code="200" has no series until the first success: an outage from the start must not be unseen."""
    document = SESSION.replace("Occurrences", "Timeslices").replace(
        "- target: 0.85", "- target: 0.95\n      timeSliceTarget: 0.9\n      timeSliceWindow: 5m"
    )

    expect(
        promtool,
        tmp_path,
        document,
        {PROMPTS: "0+10x70"},
        [("prefixwatch:slo_total_events:increase1h", "65m", 12), ("prefixwatch:slo_bad_events:increase1h", "65m", 12)],
    )


ISOLATION = (SHIPPED / "isolation.yaml").read_text(encoding="utf-8")
AUDITED = "prefixwatch_isolation_audited_requests_total"
COST = "prefixwatch_prefix_miss_cost_ratio"


@every_promtool
@pytest.mark.parametrize(
    ("document", "series", "bad_share"),
    [
        (SESSION, {PROMPTS: "0+100x65", HITS: "0+98x65"}, 0.02),
        (SESSION, {PROMPTS: "0+100x65"}, 1.0),
        (ISOLATION, {AUDITED: "0+100x65"}, 0.0),
        (MISS_COST, {f'{COST}_bucket{{le="1.5"}}': "0+95x65", f"{COST}_count": "0+100x65"}, 0.05),
    ],
    ids=["good", "good without a series yet", "bad without a series yet", "histogram"],
)
def test_what_sloth_divides_is_the_bad_share_that_our_rules_record(
    promtool: str, tmp_path: Path, *, document: str, series: dict[str, str], bad_share: float
) -> None:
    (tmp_path / "own.yaml").write_text(document)
    [spec] = specifications(load_slos([tmp_path / "own.yaml"])).values()
    events = spec["slos"][0]["sli"]["events"]
    sloths = f"{events['error_query']} / {events['total_query']}".replace("{{.window}}", "1h")

    expect(
        promtool,
        tmp_path,
        document,
        series,
        [(sloths, "65m", bad_share), ("prefixwatch:slo_bad_ratio:increase6h", "65m", bad_share)],
    )


@every_promtool
def test_the_budget_left_and_the_time_it_lasts_at_the_edges(promtool: str, tmp_path: Path) -> None:
    """15 % may be bad. Without traffic nothing is known; at 5 % bad a third is spent; all bad, it is gone at once."""
    third = {PROMPTS: "0x60 100+100x360", HITS: "0x60 95+95x360"}
    remaining, lasts = "prefixwatch:slo_error_budget_remaining:ratio", "prefixwatch:slo_error_budget_exhaustion:seconds"

    expect(promtool, tmp_path, SESSION, {PROMPTS: "5x60", HITS: "4x60"}, [(remaining, "60m", None)], every="5m")
    expect(
        promtool,
        tmp_path,
        SESSION,
        third,
        # In 6 hours 36,000 events are 5,400 of budget, of which 1,800 are spent: 3,600 are left, spent in 12 hours.
        [(remaining, "7h", 0.667), (f"round({lasts}, 60)", "7h", 43_200)],
        every="5m",
    )
    expect(
        promtool,
        tmp_path,
        SESSION,
        {PROMPTS: "0x60 100+100x360", HITS: "0x420"},
        [(remaining, "7h", -5.667), (lasts, "7h", 0)],
        every="5m",
    )
    expect(
        promtool,
        tmp_path,
        SESSION,
        {PROMPTS: "0x60 100+100x360", HITS: "0x60 100+100x360"},
        [(remaining, "7h", 1), (lasts, "7h", None)],
        every="5m",
    )


@pytest.mark.parametrize("version", [v for v in PROMTOOLS if not v.startswith("2.42")] or ["none"])
def test_a_fleet_half_on_native_histograms_is_counted_whole(version: str, tmp_path: Path) -> None:
    """grafana/jsonnet-libs#1121 (SL11). promtool 2.42 has no notation for native samples."""
    need(version in PROMTOOLS, "no promtool newer than 2.42: scripts/install-promtools fetches them on Debian")
    document = MISS_COST.replace("value: 1.5", "value: 1")
    family = "prefixwatch_prefix_miss_cost_ratio"
    native = "{{schema:0 count:0 sum:0 buckets:[0 0]}}+{{schema:0 count:10 sum:10 buckets:[5 5]}}x30"
    series = {
        f'{family}{{instance="native"}}': native,
        f'{family}_bucket{{instance="classic", le="1.0"}}': "0+20x30",
        f'{family}_bucket{{instance="classic", le="+Inf"}}': "0+20x30",
        f'{family}_count{{instance="classic"}}': "0+20x30",
    }

    expect(
        PROMTOOLS[version],
        tmp_path,
        document,
        series,
        [
            ("prefixwatch:slo_total_events:increase5m", "20m", 150),
            ("prefixwatch:slo_good_events:increase5m", "20m", 125),
        ],
    )
