from __future__ import annotations

from router.load import load_report

VLLM = b"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.5
"""


def test_counts_are_summed_over_replicas_and_usage_is_the_fullest_ones() -> None:
    report = load_report(VLLM, at_seconds=5.0)
    assert (report.running, report.waiting, report.kv_usage_ratio, report.at_seconds) == (5, 7, 0.5, 5.0)


def test_what_an_engine_does_not_say_is_unknown() -> None:
    report = load_report(b"llamacpp:requests_processing 1\n", at_seconds=0.0)
    assert (report.running, report.waiting, report.kv_usage_ratio) == (1, None, None)
