"""Every fault of a fleet in the field, and the cause that the diagnosis names: 200 workers, 6 routers, 3 models.

200 engines don't fit on one machine, so the fleet is the exporter's own series over an hour: Poisson loads that differ
by model, 50 unequal tenants that burst, counters that grow by chance. A fault changes the last ten minutes. The series
are written into a real Prometheus' storage, and the command's own code asks it (`prefixwatch diagnose --prometheus`).

    python -m benchmarks.field_faults                        # all faults and a healthy hour; writes field_faults.md
    python -m benchmarks.field_faults --workers 20 none      # a small fleet, one fault

Needs Prometheus and promtool (scripts/install-test-tools).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.field_series import MODELS, START_UNIX_SECONDS, Field
from prefixwatch.engines.process import ManagedProcess, free_ports
from prefixwatch.runbooks.diagnosis import Diagnosis
from prefixwatch.runbooks.page import shipped_runbooks
from prefixwatch.stack.diagnose.command import DiagnoseOptions, find
from prefixwatch.stack.local.monitoring import binary


@dataclass(frozen=True, slots=True)
class FieldFault:
    """One fault of the fleet and the cause that must come first."""

    title: str
    cause: str | None
    change: Callable[[Field], None]


def _each(field: Field, share: float) -> list[tuple[str, str]]:
    """This share of the workers, at least one, over all models."""
    step = max(1, round(1 / share))
    return field.workers[::step]


def _gone(field: Field) -> None:
    name, model = field.workers[17 % len(field.workers)]
    field.set(f'target_up{{target="{name}",model="{model}",system="vllm",version="0.32"}}', 0)
    field.add(f'scrape_failures_total{{target="{name}",reason="unreachable"}}', 12)


def _page_broken(field: Field) -> None:
    name, model = field.workers[17 % len(field.workers)]
    field.set(f'target_up{{target="{name}",model="{model}",system="vllm",version="0.32"}}', 0)
    field.add(f'scrape_failures_total{{target="{name}",reason="http_500"}}', 12)


def _restarted(field: Field) -> None:
    for name, model in _each(field, 0.1):
        own = f'{{target="{name}",model="{model}"}}'
        field.add(f"kv_cache_clears_total{own}", 0.3)
        field.set(f'data_quality{{target="{name}",flag="counter_reset"}}', 1)


def _small_cache(field: Field) -> None:
    field.scale("kv_blocks_regretted_total", 40.0)
    field.scale("prefix_hit_tokens_total", 0.7)


def _event_gap(field: Field) -> None:
    for name, model in _each(field, 0.3):
        own = f'{{target="{name}",model="{model}"}}'
        field.add(f"kv_event_batches_missed_total{own}", 3)
        field.add(f"kv_cache_clears_total{own}", 1)


def _flood(field: Field) -> None:
    for model in MODELS:
        added = field.counters[f'prefixwatch_tenant_prompt_tokens_total{{model="{model}",tenant="tenant-07"}}']
        total = sum(
            v[field.late].mean() for n, v in field.counters.items() if n.startswith("prefixwatch_tenant_prompt")
        )
        added[field.late] = total * 0.6
    field.scale("kv_blocks_regretted_total", 5.0)


def _affinity(field: Field) -> None:
    field.scale("sticky_collisions_total", 14.0)
    field.scale("session_migrations_total", 6.0)
    field.set("sessions_moved_ratio", 0.5)


def _hot(field: Field) -> None:
    workers = field.of("llama-70b")
    field.set('hotspot_top_share_ratio{model="llama-70b"}', 8.0 / len(workers))
    for name in ("worker_load_requests", "requests_running", "router_in_flight_requests"):
        field.scale(f'{name}{{target="{workers[3]}"', 8.0)


def _slow(field: Field) -> None:
    name = field.of("llama-70b")[3 % len(field.of("llama-70b"))]
    field.scale(f'engine_latency_quantile_seconds{{target="{name}"', 5.0)


def _predict(predicted: float = 1.0, delivered: float = 1.0, believed: float = 1.0) -> Callable[[Field], None]:
    def change(field: Field) -> None:
        field.scale("predicted_hit_tokens_total", predicted)
        field.scale("delivered_hit_tokens_total", delivered)
        field.scale("router_believed_blocks", believed)

    return change


def _and(*changes: Callable[[Field], None]) -> Callable[[Field], None]:
    def change(field: Field) -> None:
        for each in changes:
            each(field)

    return change


def _scale(prefix: str, factor: float) -> Callable[[Field], None]:
    return lambda field: field.scale(prefix, factor)


def _of_models(prefix: str, labels: str, per_minute: float) -> Callable[[Field], None]:
    def change(field: Field) -> None:
        for model in MODELS:
            field.add(f'{prefix}{{model="{model}",{labels}}}', per_minute)

    return change


def _unserved(outcome: str, per_minute: float) -> Callable[[Field], None]:
    """This number of requests of each model end like this, and miss the objectives that count them."""
    return _and(
        _of_models("requests_total", f'class="chat",outcome="{outcome}"', per_minute),
        *(
            _of_models("slo_requests_total", f'slo="{slo}",verdict="bad"', per_minute)
            for slo in ("availability", "goodput")
        ),
    )


def _at_workers(share: float, set_to: Callable[[Field, str, str], None]) -> Callable[[Field], None]:
    def change(field: Field) -> None:
        for name, model in _each(field, share):
            set_to(field, name, model)

    return change


FAULTS: Mapping[str, FieldFault] = {
    "none": FieldFault("nothing is wrong", None, lambda _: None),
    "hot-prefix": FieldFault("one worker of a model gets eight times its share", "hot_prefix", _hot),
    "cache-too-small": FieldFault("a third of what is evicted is wanted again", "cache_too_small", _small_cache),
    "engine-gone": FieldFault("one worker is down", "target_unreachable", _gone),
    "rolling-restart": FieldFault("every tenth worker restarts", "engine_restarted", _restarted),
    "event-gap": FieldFault("a third of the workers lose KV events", "event_gap", _event_gap),
    "salt-dropped": FieldFault(
        "traffic goes out without salts",
        "salt_dropped",
        _of_models("isolation_violations_total", 'kind="unsalted_traffic"', 50),
    ),
    "salts-too-fine": FieldFault(
        "one salt per request",
        "salts_too_fine",
        _and(_scale("isolation_lost_hit_tokens_total", 45.0), _scale("prefix_hit_tokens_total", 0.4)),
    ),
    "router-blind": FieldFault("routers hear no KV events", "router_blind", _predict(predicted=0.05, believed=0.01)),
    "tokenizer-mismatch": FieldFault(
        "the engines' chat template changed",
        "tokenizer_mismatch",
        _and(
            _predict(delivered=0.2),
            _of_models("prompt_token_checks_total", 'result="different"', 3_000),
            _scale("prefix_hit_tokens_total", 0.3),
        ),
    ),
    "block-size": FieldFault(
        "engines use blocks of 256 tokens, routers of 16",
        "block_size_mismatch",
        _and(_predict(delivered=0.3), _scale("block_size_tokens", 16.0), _scale("kv_blocks_evicted_total", 0.0)),
    ),
    "hash-seed": FieldFault("another hash seed at the engines", "blocks_named_differently", _predict(predicted=0.04)),
    "stale-history": FieldFault(
        "a routing history that outlives the caches",
        "belief_outlives_cache",
        _predict(delivered=0.4, believed=4.0),
    ),
    "other-routers": FieldFault(
        "six routers with a history each", "other_router", _predict(predicted=0.3, believed=0.17)
    ),
    "kv-split": FieldFault(
        "prefill and decode were split",
        "kv_split",
        _and(_predict(predicted=0.4, delivered=1.38), _scale("tenant_hit_tokens_total", 1.385)),
    ),
    "leak": FieldFault(
        "a proxy holds one worker's finished streams",
        "in_flight_leak",
        _at_workers(0.004, lambda f, n, m: f.set(f'in_flight_leak_requests{{target="{n}",model="{m}"}}', 40)),
    ),
    "janitor": FieldFault(
        "routers forget live requests", "in_flight_dropped", _scale("router_in_flight_requests", 0.4)
    ),
    "slow-worker": FieldFault("one worker of the largest model is throttled", "slow_worker", _slow),
    "metric-renamed": FieldFault(
        "an upgrade of a third of the engines renames a metric",
        "metric_renamed",
        _at_workers(0.3, lambda f, n, _: f.set(f'data_quality{{target="{n}",flag="missing_family"}}', 1)),
    ),
    "metrics-page-broken": FieldFault("one metrics page answers 500", "metrics_endpoint_failing", _page_broken),
    "tenant-flood": FieldFault("one tenant of fifty floods the caches", "tenant_flood", _flood),
    "affinity-lost": FieldFault("a proxy drops the session header", "affinity_lost", _affinity),
    "refusals": FieldFault("gateways refuse", "engine_refuses", _unserved("refused", 900)),
    "failures": FieldFault("requests time out", "requests_failing", _unserved("timed_out", 900)),
    "preemptions": FieldFault(
        "a fifth of the engines preempt",
        "preemption_storm",
        _at_workers(0.2, lambda f, n, m: f.add(f'preemptions_total{{target="{n}",model="{m}"}}', 12)),
    ),
    "caching-off": FieldFault(
        "caching is off at a fifth of the engines",
        "prefix_caching_off",
        _at_workers(0.2, lambda f, n, _: f.set(f'data_quality{{target="{n}",flag="prefix_caching_off"}}', 1)),
    ),
}


@contextlib.asynccontextmanager
async def prometheus_with(text: str, folder: Path) -> AsyncIterator[str]:
    """A real Prometheus that has these series and scrapes nothing; its address."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "field.om").write_text(text, encoding="utf-8")
    made = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(folder / "field.om"), str(folder / "data")]
    await asyncio.to_thread(subprocess.run, made, check=True, capture_output=True)
    (folder / "prometheus.yml").write_text("scrape_configs: []\n", encoding="utf-8")
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [
        binary("prometheus") or "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--storage.tsdb.retention.time=20y",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    process = ManagedProcess("prometheus", command, folder / "prometheus.log")
    try:
        await process.wait_ready(f"{url}/-/ready", 120.0)
        yield url
    finally:
        process.kill()


async def diagnosed(field: Field, folder: Path, minutes: Sequence[int] = ()) -> list[Diagnosis]:
    """What `prefixwatch diagnose` says at these minutes, or at the last one."""
    async with prometheus_with(field.openmetrics(), folder) as url:
        found = []
        for minute in minutes or [field.minutes - 1]:
            at = datetime.fromtimestamp(START_UNIX_SECONDS + 60 * minute + 1, UTC)
            finding = await find(DiagnoseOptions(prometheus=url, at=at), shipped_runbooks())
            found.append(finding.diagnosis)
        return found


async def drill(name: str, workers: int, folder: Path) -> Diagnosis:
    """One fault on a fleet of this size."""
    field = Field(workers, seed=sum(map(ord, name)))
    FAULTS[name].change(field)
    [diagnosis] = await diagnosed(field, folder)
    return diagnosis


async def healthy_hour(workers: int, folder: Path) -> list[Diagnosis]:
    """Every five minutes of an hour in which nothing is wrong."""
    field = Field(workers, seed=1)
    return await diagnosed(field, folder, range(10, field.minutes, 5))


def passed(name: str, diagnosis: Diagnosis) -> bool:
    fault = FAULTS[name]
    named = [each.id for each in diagnosis.causes]
    return named == ([fault.cause] if fault.cause else [])


_HEAD = """\
# Faults of a fleet in the field

Written by `python -m benchmarks.field_faults`: {workers} workers of 3 models, 6 routers that share them, 50 unequal
tenants that burst. Each fault changes the last 10 minutes of an hour of the exporter's series in a real
Prometheus, and `prefixwatch diagnose` is asked without a hint. *Named* lists every cause that was named, the first one
first.

| | fault | expected first | named | workers concerned | possible |
|---|---|---|---|---|---|
"""


def _row(name: str, diagnosis: Diagnosis) -> str:
    share = diagnosis.found.share if diagnosis.found else None
    concerned = "the fleet" if share is None else f"{share:.1%}"
    cells = (
        "✓" if passed(name, diagnosis) else "✗",
        f"{name}: {FAULTS[name].title}",
        FAULTS[name].cause or "nothing",
        ", ".join(each.id for each in diagnosis.causes) or diagnosis.verdict,
        concerned if diagnosis.found else "",
        ", ".join(each.id for each in diagnosis.possible),
    )
    return "| " + " | ".join(cells) + " |"


async def _all(names: Sequence[str], workers: int) -> tuple[str, bool]:
    rows, good = [], []
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        for name in names:
            diagnosis = await drill(name, workers, Path(folder) / name)
            good.append(passed(name, diagnosis))
            rows.append(_row(name, diagnosis))
            print(rows[-1], flush=True)
        hour = await healthy_hour(workers, Path(folder) / "hour")
    accused = sorted({each.id for diagnosis in hour for each in diagnosis.causes})
    verdicts = ", ".join(sorted({diagnosis.verdict for diagnosis in hour}))
    closing = f"A healthy hour, asked {len(hour)} times: {', '.join(accused) or 'no cause named'} ({verdicts})."
    text = _HEAD.format(workers=workers) + "\n".join([*rows, "", closing, ""])
    return text, all(good) and not accused


def command(module: str, run: Callable[[Sequence[str], int], Coroutine[None, None, tuple[str, bool]]]) -> int:
    """The command of a drill of these faults: `run` takes their names and the number of workers, and gives the record
    and whether all was as it should be. All faults together write the record beside the module."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}")
    parser.add_argument("faults", nargs="*", help="names; all without any, which also writes the file")
    parser.add_argument("--workers", type=int, default=200)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.faults if name not in FAULTS]:
        parser.error(f"no fault {unknown[0]!r}: there are {', '.join(FAULTS)}")
    begun = time.monotonic()
    text, good = asyncio.run(run(arguments.faults or list(FAULTS), arguments.workers))
    text += f"{time.monotonic() - begun:.0f} s.\n"
    print("\n".join(text.splitlines()[-2:]))
    if not arguments.faults:
        (Path(__file__).parent / f"{module}.md").write_text(text, encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(command("field_faults", _all))
