"""One definition of goodput: the load test's grader and the exporter's counters judge the same requests alike."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from exporters.requests.ledger import ROUTER, RequestLedger
from kvcache import request_record
from loadgen import records
from loadgen.columns import Columns
from loadgen.grade import goodput, grade_objective
from slo.document import load_objectives, load_request_objectives, shipped_names

GRADED = load_objectives(["availability", "ttft", "tpot", "goodput"])
SHIPPED = load_request_objectives(shipped_names())
AS_THE_ROUTER_SAYS = {"cut_off": "disconnected"}

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
    outcome=st.sampled_from(records.Outcome),
    planned_prompt_tokens=st.integers(1, 4000),
    output_tokens=st.sampled_from([1, 2, 11, 51]),
)


def as_seen_by_the_router(logged: records.RequestRecord) -> request_record.RequestRecord:
    return request_record.RequestRecord(
        ended_unix_seconds=1.7e9,
        outcome=AS_THE_ROUTER_SAYS.get(logged.outcome.value, logged.outcome.value),
        request_class=logged.request_class,
        prompt_tokens=logged.planned_prompt_tokens,
        output_tokens=logged.output_tokens,
        ttft_seconds=logged.ttft_s,
        tpot_seconds=logged.tpot_s,
        e2e_seconds=logged.end_s,
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(_LOGGED, min_size=1, max_size=40))
def test_the_exporter_counts_what_the_grader_grades(log: list[records.RequestRecord]) -> None:
    """The exporter judges all shipped objectives, the grader those of its scenario."""
    columns, ledger = Columns.of(log), RequestLedger(objectives=SHIPPED)
    for logged in log:
        ledger.record(as_seen_by_the_router(logged), ROUTER)
    counted = {
        tuple(sorted(sample.labels.items())): sample.value
        for family in ledger.metrics(0.0)
        for sample in family.samples
        if sample.name in ("prefixwatch_goodput_requests_total", "prefixwatch_slo_requests_total")
    }
    good = sum(value for labels, value in counted.items() if labels[0][0] == "class")
    assert good == goodput(columns, GRADED).sum()
    for objective in GRADED:
        graded = grade_objective(columns, objective)
        assert counted[("slo", objective.name), ("verdict", "good")] == graded.good
        assert counted[("slo", objective.name), ("verdict", "bad")] == graded.total - graded.good
