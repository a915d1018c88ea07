"""One definition of goodput: the load test's grader and the exporter's counters judge the same requests alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.exporters.metrics_page.families import SERVED
from prefixwatch.exporters.requests.ledger import ROUTER, RequestLedger
from prefixwatch.kvcache import request_record
from prefixwatch.kvcache.cache_class import UNKNOWN
from prefixwatch.loadgen.grading.grade import grade_objective
from prefixwatch.loadgen.grading.measured import Measured
from prefixwatch.loadgen.request_log import records
from prefixwatch.loadgen.request_log.columns import Columns
from prefixwatch.slo.build import load_objectives, load_request_objectives, shipped_names
from prefixwatch.slo.selection import Selection

GRADED = load_objectives(["availability", "ttft", "tpot", "goodput"])
SHIPPED = load_request_objectives(shipped_names())
CACHES = (("hit",), ("partial",), ("miss",), ("hit", "partial"))
OF_CACHE_CLASSES = [
    replace(
        GRADED[1],
        name=f"ttft-{'-'.join(caches)}-{longer_than:g}",
        selection=Selection(caches=caches, above_tokens=longer_than),
    )
    for caches in CACHES
    for longer_than in (-1.0, 2000.0)
]
AS_THE_ROUTER_SAYS = {"cut_off": "failed", "cancelled": "disconnected"}
SENT = [outcome for outcome in records.Outcome if outcome is not records.Outcome.NEVER_SENT]

_LOGGED = st.builds(
    records.RequestRecord,
    id=st.just("r"),
    policy=st.just("p"),
    repeat=st.just(0),
    index=st.integers(0, 1000),
    phase=st.just("measured"),
    tenant=st.just("a"),
    session=st.just("s"),
    turn=st.just(0),
    group=st.just("g"),
    request_class=st.sampled_from(["chat", "batch"]),
    scheduled_s=st.just(0.0),
    sent_s=st.just(0.0),
    first_token_s=st.one_of(st.none(), st.sampled_from([0.25, 0.375, 0.5, 0.75])),
    end_s=st.sampled_from([1.0, 2.0]),
    outcome=st.sampled_from(SENT),
    planned_prompt_tokens=st.integers(1, 4000),
    planned_shared_tokens=st.one_of(st.just(0), st.integers(0, 4000)),
    cached_tokens=st.one_of(st.none(), st.just(0), st.integers(0, 4000)),
    output_tokens=st.sampled_from([1, 2, 11, 51]),
)


def as_seen_by_the_router(logged: records.RequestRecord, block_size: int) -> request_record.RequestRecord:
    return request_record.RequestRecord(
        ended_unix_seconds=1.7e9,
        outcome=AS_THE_ROUTER_SAYS.get(logged.outcome.value, logged.outcome.value),
        request_class=logged.request_class,
        prompt_tokens=logged.planned_prompt_tokens,
        cached_tokens=logged.cached_tokens,
        reusable_tokens=logged.planned_shared_tokens,
        block_size=block_size,
        output_tokens=logged.output_tokens,
        ttft_seconds=logged.ttft_s,
        tpot_seconds=logged.tpot_s,
        e2e_seconds=logged.end_s,
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(_LOGGED, min_size=1, max_size=40), st.sampled_from([16, 64, 512]))
def test_the_exporter_counts_what_the_grader_grades(log: list[records.RequestRecord], block_size: int) -> None:
    """The exporter judges all shipped objectives, the grader those of its scenario; here also by cache class."""
    columns, ledger = Columns.of(log, block_size), RequestLedger(objectives=[*SHIPPED, *OF_CACHE_CLASSES])
    measured = Measured(columns, GRADED)
    for logged in log:
        ledger.record(as_seen_by_the_router(logged, block_size), ROUTER)
    counted = {
        tuple(sorted((name, value) for name, value in sample.labels.items() if name not in SERVED)): sample.value
        for family in ledger.metrics(0.0)
        for sample in family.samples
        if sample.name
        in (
            "prefixwatch_goodput_requests_total",
            "prefixwatch_slo_requests_total",
            "prefixwatch_cache_class_requests_total",
        )
    }
    good = sum(value for labels, value in counted.items() if labels[0][0] == "class")
    assert good == measured.good.sum()
    for objective in (*GRADED, *OF_CACHE_CLASSES):
        graded = grade_objective(measured, objective)
        assert counted[("slo", objective.name), ("verdict", "good")] == graded.good
        assert counted[("slo", objective.name), ("verdict", "bad")] == graded.total - graded.good
    classes = Counter(zip(columns.cache_class(), columns.cache_basis(), strict=True))
    assert {
        (dict(labels)["cache"], dict(labels)["basis"]): value
        for labels, value in counted.items()
        if len(labels) == 2 and labels[0][0] == "basis"
    } == {key: count for key, count in classes.items() if key[0] != UNKNOWN}


def test_engines_with_large_blocks_have_hits_to_judge(tmp_path: Path) -> None:
    """A hit of 1,024 of 1,500 shared tokens in blocks of 512 (a block of 16 would make it a partial hit). The block
    size is kept in the log, so that whoever grades the file later uses it too."""
    logged = records.RequestRecord(
        "r", "p", 0, 0, "measured", "a", "s", 0, "g", "chat", scheduled_s=0.0, sent_s=0.0, first_token_s=0.25,
        outcome=records.Outcome.COMPLETED, planned_prompt_tokens=2000, planned_shared_tokens=1500, cached_tokens=1024,
        output_tokens=11, end_s=1.0,
    )  # fmt: skip
    hits = OF_CACHE_CLASSES[0]
    assert grade_objective(Measured(Columns.of([logged], 512)), hits).total == 1
    records.write_requests(tmp_path / "requests.parquet", [logged], 512)
    table = records.read_request_table(tmp_path / "requests.parquet")
    assert grade_objective(Measured(Columns.of(table)), hits).total == 1
    ledger = RequestLedger(objectives=[hits])
    ledger.record(as_seen_by_the_router(logged, 512), ROUTER)
    assert ledger.document(0.0)["objectives"][hits.name]["good"] == 1
