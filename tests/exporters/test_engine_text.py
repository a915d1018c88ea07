"""What engines, caches and GPUs tell of themselves, on the exporter's own page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prefixwatch.exporters.fleet.derivation import derive_fleet
from prefixwatch.exporters.metrics_page.families import FAMILIES, NAMESPACE
from prefixwatch.exporters.metrics_page.fleet_families import render
from prefixwatch.exporters.scraping.target import Target

MakeTarget = Callable[..., Target]
Capture = Callable[[str], bytes]

CAPTURES = sorted((Path(__file__).parent / "captures").iterdir())


def page(*targets: Target) -> list[str]:
    return render(targets)[0].decode().split("\n")


def queue(bounds: tuple[str, ...], counts: tuple[int, ...], total: float) -> str:
    name = "vllm:request_queue_time_seconds"
    lines = [f'{name}_bucket{{le="{bound}"}} {count}\n' for bound, count in zip(bounds, counts, strict=True)]
    return "vllm:num_requests_running 0\n" + "".join(lines) + f"{name}_sum {total}\n{name}_count {counts[-1]}\n"


def test_speculation_and_block_lives_of_a_real_engine(capture: Capture, make_target: MakeTarget) -> None:
    lines = page(make_target("e0", capture("vllm_0.32.0_kvmetrics_mfu_spec").decode()))
    assert 'prefixwatch_speculative_draft_tokens_total{model="tiny",target="e0"} 62.0' in lines
    assert 'prefixwatch_speculative_accepted_tokens_total{model="tiny",target="e0"} 62.0' in lines
    assert 'prefixwatch_kv_block_lifetime_seconds_count{model="tiny",target="e0"} 289.0' in lines
    assert 'prefixwatch_kv_block_idle_before_evict_seconds_sum{model="tiny",target="e0"} 7104.946991302994' in lines


def test_preemptions_of_a_real_engine(capture: Capture, make_target: MakeTarget) -> None:
    assert 'prefixwatch_preemptions_total{model="tiny",target="e0"} 2.0' in page(
        make_target("e0", capture("vllm_0.32.0").decode())
    )


def test_evictions_in_the_unit_that_a_store_counts_in(capture: Capture, make_target: MakeTarget) -> None:
    """Mooncake's keys and LMCache's chunks are objects, never KV blocks."""
    lines = page(
        make_target("store", capture("mooncake-master_0.3.13.post1").decode()),
        make_target("cache", capture("lmcache-server_0.5.6").decode()),
        make_target("engine", "sglang:num_running_reqs 0\nsglang:evicted_tokens_total 640\n"),
    )
    assert 'prefixwatch_kv_evicted_objects_total{target="store"} 69.0' in lines
    assert 'prefixwatch_kv_evicted_objects_total{model="test-model",target="cache"} 308.0' in lines
    assert 'prefixwatch_kv_evicted_tokens_total{target="engine"} 640.0' in lines
    assert not any(line.startswith("prefixwatch_kv_blocks_evicted_total{") for line in lines)


def test_what_a_kv_store_holds_of_what_it_is_asked_for(make_target: MakeTarget) -> None:
    """LMCache/LMCache#4962 (EM29): of the 1,000 that the store was asked for it held 600, 0.75 and 0.25 of them by
    tier; the engine's 2,000 of 4,000 are another tier and another denominator."""
    lookups = {"requested": 1000, "hit_l1": 450, "hit_l2": 150, "hit": 600}
    store = "".join(f"lmcache_mp_lookup_{name}_tokens_total {count}\n" for name, count in lookups.items())
    engine = "vllm:prefix_cache_hits_total 2000\nvllm:prefix_cache_queries_total 4000\n"
    objects = "master_allocated_bytes 1\nmaster_total_capacity_bytes 2\ntotal_get_nums_ 9\nvalid_get_nums_ 6\n"
    lines = page(make_target("lm", store), make_target("e", engine), make_target("mc", objects))
    told = [
        line.removeprefix("prefixwatch_") for line in lines if "_tokens_total{" in line or "_objects_total{" in line
    ]
    assert told == [
        'prefix_hit_tokens_total{target="e",tier="gpu"} 2000.0',
        'prefix_query_tokens_total{target="e"} 4000.0',
        'kv_store_query_objects_total{target="mc"} 9.0',
        'kv_store_hit_objects_total{target="mc"} 6.0',
        'kv_store_query_tokens_total{target="lm"} 1000.0',
        'kv_store_hit_tokens_total{target="lm",tier="cpu"} 450.0',
        'kv_store_hit_tokens_total{target="lm",tier="l2"} 150.0',
    ]


def test_a_target_that_is_down_repeats_no_number_of_its_own(capture: Capture, make_target: MakeTarget) -> None:
    """vllm-project/vllm#49983 (EM17): last good values are not shown as fresh; sums over the fleet stay."""
    up, down = (make_target("e0", capture("vllm_0.32.0").decode(), *failed) for failed in ((), ("http_500",)))
    own = ("preemptions_total", "kv_block_lifetime_seconds_count", "kv_usage_ratio", "prefix_hit_tokens_total")
    for family in own:
        assert any(line.startswith(f"prefixwatch_{family}{{") for line in page(up))
        assert not any(line.startswith(f"prefixwatch_{family}{{") for line in page(down))
    assert "prefixwatch_prefill_wait_seconds_count 59.0" in page(down)
    gpus = make_target("node", 'DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0"} 5000\n', "timeout")
    assert not any("gpu_energy_joules" in line for line in page(gpus))


def test_waits_of_engines_are_added_up(make_target: MakeTarget) -> None:
    bounds = ("0.3", "1.0", "+Inf")
    lines = page(make_target("a", queue(bounds, (8, 9, 10), 4.0)), make_target("b", queue(bounds, (1, 2, 10), 30.0)))
    assert 'prefixwatch_prefill_wait_seconds_bucket{le="1.0"} 11.0' in lines
    assert "prefixwatch_prefill_wait_seconds_sum 34.0" in lines
    assert not any("mixed_buckets" in line for line in lines)


def test_waits_with_different_bounds_are_added_where_they_meet_and_say_so(make_target: MakeTarget) -> None:
    """ray-project/ray#65892 (EM32)."""
    a = make_target("a", queue(("0.1", "1", "+Inf"), (10, 90, 100), 50.0))
    b = make_target("b", queue(("0.25", "2", "+Inf"), (10, 90, 100), 50.0))
    c = make_target("c", "vllm:num_requests_running 0\n")
    lines = page(a, b, c)
    assert [line for line in lines if line.startswith("prefixwatch_prefill_wait_seconds_bucket")] == [
        'prefixwatch_prefill_wait_seconds_bucket{le="+Inf"} 200.0'
    ]
    assert [line for line in lines if "mixed_buckets" in line] == [
        'prefixwatch_data_quality{flag="mixed_buckets",target="a"} 1.0',
        'prefixwatch_data_quality{flag="mixed_buckets",target="b"} 1.0',
    ]
    note = "targets' bucket bounds differ: only the 1 that all have are kept, +Inf included"
    assert derive_fleet([a, b, c]).notes == {"prefill_wait_seconds": note, "engine_queue_seconds": note}


def test_transfers_by_where_from_and_where_to(make_target: MakeTarget) -> None:
    engine = (
        'vllm:num_requests_running 0\nvllm:nixl_xfer_time_seconds_bucket{le="+Inf"} 4\n'
        "vllm:nixl_xfer_time_seconds_sum 0.2\nvllm:nixl_xfer_time_seconds_count 4\n"
        "vllm:nixl_bytes_transferred_sum 4096\nvllm:nixl_num_failed_transfers_total 1\n"
    )
    lines = page(make_target("a", engine), make_target("b", engine))
    ends = '{destination="gpu",source="remote"}'
    assert f"prefixwatch_kv_transfer_seconds_sum{ends} 0.4" in lines
    assert f"prefixwatch_kv_transfer_bytes_total{ends} 8192.0" in lines
    assert f"prefixwatch_kv_transfer_failures_total{ends} 2.0" in lines


def test_what_a_target_moved_stays_counted_when_it_goes(make_target: MakeTarget) -> None:
    moved = "vllm:num_requests_running 0\nvllm:nixl_bytes_transferred_sum 4096\n"
    stays, gone = make_target("a", moved), make_target("b", moved)
    lines = render([stays], gone=[gone])[0].decode().split("\n")
    assert 'prefixwatch_kv_transfer_bytes_total{destination="gpu",source="remote"} 8192.0' in lines


def test_a_tier_that_isnt_told_is_unknown(capture: Capture, make_target: MakeTarget) -> None:
    lines = page(make_target("cache", capture("lmcache-inprocess_0.5.6").decode()))
    assert 'prefixwatch_kv_transfer_seconds_count{destination="gpu",source="unknown"} 1.0' in lines


def test_the_balance_of_experts_is_the_mean_of_the_window(make_target: MakeTarget) -> None:
    def sglang(total: float, count: int) -> str:
        labels = '{forward_mode="decode"}'
        return (
            f"sglang:num_running_reqs 0\nsglang:eplb_balancedness_sum{labels} {total}\n"
            f"sglang:eplb_balancedness_count{labels} {count}\n"
        )

    lines = page(make_target("e", sglang(9.0, 10), sglang(22.0, 30)))
    assert 'prefixwatch_moe_expert_alignment_ratio{target="e"} 0.65' in lines


def test_gpus(make_target: MakeTarget) -> None:
    """A GPU that is cut into instances repeats its power for each of them: 300 W, not 600."""
    node = (
        'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 87\nDCGM_FI_DEV_POWER_USAGE{gpu="1",GPU_I_ID="1"} 300\n'
        'DCGM_FI_DEV_POWER_USAGE{gpu="1",GPU_I_ID="2"} 300\nDCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0"} 5000\n'
    )
    lines = page(make_target("node", node))
    assert 'prefixwatch_gpu_utilization_ratio{gpu="0",target="node"} 0.87' in lines
    assert 'prefixwatch_gpu_power_watts{gpu="1",target="node"} 300.0' in lines
    assert 'prefixwatch_gpu_energy_joules_total{gpu="0",target="node"} 5.0' in lines


def test_gauges_of_a_gpu_that_cant_be_reached_are_not_frozen(make_target: MakeTarget) -> None:
    lines = page(make_target("node", 'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 87\n', "refused"))
    assert not any(line.startswith("prefixwatch_gpu_utilization_ratio{") for line in lines)


def test_bounds_are_spelled_as_prometheus_3_stores_them(make_target: MakeTarget) -> None:
    """prometheus/prometheus#14485 (SL06): `1.0` on our page, so a rule needs one spelling whatever the engine wrote."""
    lines = page(make_target("a", queue(("0.3", "1", "+Inf"), (1, 2, 3), 1.0)))
    bounds = [line for line in lines if line.startswith("prefixwatch_prefill_wait_seconds_bucket")]
    assert [line.split('"')[1] for line in bounds] == ["0.3", "1.0", "+Inf"]


def test_no_page_makes_a_family_that_the_table_doesnt_have(make_target: MakeTarget, capture: Capture) -> None:
    """vllm-project/production-stack#989 (SL14): panels and rules may use the table's names; nothing else is written."""
    names = [path.name.removeprefix("metrics_").removesuffix(".gz").removesuffix(".txt") for path in CAPTURES]
    targets = [make_target(name, capture(name).decode(), capture(name).decode()) for name in names]
    written = {line.split(" ")[2] for line in page(*targets) if line.startswith("# TYPE prefixwatch_")}
    known = {f"{NAMESPACE}{family.name}" for family in FAMILIES.values()}
    assert {name.removesuffix("_total") for name in written} <= {name.removesuffix("_total") for name in known}
    assert len(written) > 30
