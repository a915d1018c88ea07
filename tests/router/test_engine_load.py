from __future__ import annotations

from prefixwatch.router.placement.load import load_report

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


def test_kv_capacity_is_blocks_times_block_size_or_sglangs_tokens() -> None:
    vllm = (
        b'vllm:cache_config_info{_block_size_resolved="True",block_size="32",cache_dtype="auto",'
        b'num_gpu_blocks="512",num_gpu_blocks_override="7"} 1.0\n'
    )
    assert load_report(vllm, 0.0).kv_capacity_tokens == 16_384
    assert load_report(vllm.replace(b'"512"', b'"None"'), 0.0).kv_capacity_tokens is None
    assert load_report(b'sglang:max_total_num_tokens{model_name="m"} 4096.0\n', 0.0).kv_capacity_tokens == 4096
    assert load_report(VLLM, 0.0).kv_capacity_tokens is None
