"""A family under another name is read all the same where the new name follows a pattern, and seen where it doesn't."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwatch.exporters.catalogue.check import check
from prefixwatch.exporters.catalogue.model import shipped_catalogue
from prefixwatch.exporters.catalogue.renames import follow
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.fleet.api import fleet_document
from prefixwatch.exporters.scraping.exposition import metric_names
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.target import Target

CAPTURES = Path(__file__).parent / "captures"
PAGES = (
    "vllm_0.32.0_default_flags.txt", "vllm_0.32.0_kvconnector.txt", "dynamo-mocker_1.6.1_sgl_w1.txt.gz",
    "dynamo-mocker_1.6.1_trt_w1.txt.gz", "dynamo-frontend_1.6.1_kv.txt.gz", "smg_1.13.0_cache_aware.txt.gz",
    "lmcache-inprocess_0.5.6.txt.gz", "mooncake-master_0.3.13.post1.txt.gz", "vllm-router_0.1.17_cache_aware.txt",
)  # fmt: skip


@cache
def page(name: str) -> str:
    body = (CAPTURES / f"metrics_{name}").read_bytes()
    return (gzip.decompress(body) if name.endswith(".gz") else body).decode()


def target(*texts: str) -> Target:
    config = TargetConfig(name="e", url="http://e:8000/metrics")
    made = Target(config, ExporterConfig(targets=(config,)), shipped_catalogue())
    for step, text in enumerate(texts):
        made.ingest(Scrape(0.01, text.encode()), 5.0 * step)
    return made


def figures(made: Target) -> dict[str, object]:
    """Every signal that the target gives, by its canonical series."""
    signals = fleet_document([made], 5.0)["targets"][0]["signals"]
    return {
        name: {key: value for key, value in signal.items() if key in ("series", "count", "sum")}
        for name, signal in signals.items()
    }


@cache
def healthy(name: str) -> tuple[Target, dict[str, object]]:
    made = target(page(name))
    return made, figures(made)


def families(name: str) -> list[str]:
    """Families of the page that the catalogue reads."""
    made, _ = healthy(name)
    assert made.system is not None
    names = metric_names(page(name).encode())
    return sorted(
        {
            re.sub("_(sum|count)$", "", family.name) if histogram_of(family.name, names) else family.name
            for signal in made.system.signals.values()
            if (source := signal.source_on(names))
            for family in source.families
            if family.marker(signal.kind) in names and not family.name.startswith("process_")
        }
    )


def histogram_of(name: str, names: frozenset[str]) -> bool:
    """Whether this is a part of a histogram, which is renamed as a whole."""
    return re.sub("_(sum|count)$", "_bucket", name) in names - {name}


def without_or_with_total(family: str) -> str:
    return family.removesuffix("_total") if family.endswith("_total") else f"{family}_total"


def other_separator(family: str) -> str:
    return family.replace(":", "_") if ":" in family else family.replace("_", ":", 1)


def foreign_prefix(family: str) -> str:
    return f"acme_{family.partition(':')[2] or family}"


def with_suffix(family: str) -> str:
    return re.sub(r"(_total)?$", r"_nixlconnector\1", family, count=1)


PATTERNS: tuple[Callable[[str], str], ...] = (without_or_with_total, other_separator, foreign_prefix, with_suffix)


def renamed(text: str, changes: dict[str, str]) -> str:
    """The page with these families under other names, in samples and declarations."""
    for old, new in changes.items():
        name = rf"(?m)^((?:# (?:TYPE|HELP) )?){re.escape(old)}(?=[ {{]|_(?:bucket|sum|count|created)\b)"
        text = re.sub(name, rf"\g<1>{new}", text)
    return text


@settings(max_examples=25)
@given(st.data())
def test_any_family_renamed_by_any_pattern_gives_the_same_figures_or_a_flag(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(PAGES))
    family, pattern = data.draw(st.sampled_from(families(name))), data.draw(st.sampled_from(PATTERNS))
    new = pattern(family)
    made, (_, before) = target(renamed(page(name), {family: new})), healthy(name)
    after = figures(made) if made.up else {}
    if after == before:
        return
    flags = made.flags(0.0)
    assert not made.up or flags["missing_family"] or flags["renamed_family"], (family, new)


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("pattern", [without_or_with_total, other_separator])
def test_a_whole_page_in_another_spelling_says_the_same(name: str, pattern: Callable[[str], str]) -> None:
    made = target(renamed(page(name), {family: pattern(family) for family in families(name)}))
    assert made.up
    assert figures(made) == healthy(name)[1]


@pytest.mark.parametrize("prefix", ["acme:", "acme_llm_", "VLLM_", "team_a:"])
def test_a_page_under_a_prefix_of_its_own_is_its_system_s(prefix: str) -> None:
    name = "vllm_0.32.0_default_flags.txt"
    made = target(page(name).replace("vllm:", prefix))
    assert made.system is not None
    assert (made.system.system, made.version) == ("vllm", healthy(name)[0].version)
    assert figures(made) == healthy(name)[1]
    assert made.renames.families[f"{prefix}num_requests_running"] == "vllm:num_requests_running"
    assert fleet_document([made], 5.0)["targets"][0]["renamed_families"] == dict(made.renames.families)


def test_two_names_in_common_with_a_system_are_a_coincidence() -> None:
    made = target("acme:num_requests_running 1\nacme:num_requests_waiting 2\n")
    assert made.reason == "unknown_system"


def test_llm_d_between_two_releases_had_another_prefix() -> None:
    """llm-d/llm-d-router#2826: `llm_d_router_epp_` for some weeks."""
    labels = 'model_name="m",target_model_name="m"'
    lines = ['llm_d_router_epp_scheduler_attempts_total{status="success",endpoint_name="e1"} 60\n']
    for name, total in (("request_input_tokens", 60_000), ("request_cached_tokens", 24_000)):
        full = f"llm_d_router_epp_{name}"
        lines.append(f'{full}_bucket{{{labels},le="+Inf"}} 60\n{full}_sum{{{labels}}} {total}\n')
        lines.append(f"{full}_count{{{labels}}} 60\n")
    made = target("".join(lines))
    assert made.system is not None
    assert made.system.system == "llm-d-epp"
    assert made.store is not None
    assert made.store.total("router_prompt_tokens") == 60_000
    assert made.store.total("router_delivered_hit_tokens") == 24_000


SHARED = """\
vllm:num_requests_running{engine="0",model_name="m"} 1
vllm:kv_offload_total_bytes_total{engine="0",transfer_type="CPU_to_GPU"} 4e6
vllm:kv_offload_total_bytes_total{engine="0",transfer_type="GPU_to_CPU"} 2e6
vllm:kv_offload_total_bytes_sharedstorage_total{engine="0",transfer_type="SHARED_STORAGE_to_GPU"} 2e7
vllm:kv_offload_total_bytes_sharedstorage_total{engine="0",transfer_type="GPU_to_SHARED_STORAGE"} 8e6
"""


@pytest.mark.parametrize(
    ("suffix", "kind", "tier"),
    [("sharedstorage", "SHARED_STORAGE", "remote"), ("fs", "FILE", "disk"), ("x2", "LOCAL_NVME", "disk"),
     ("new", "TAPE", "unknown")],
)  # fmt: skip
def test_a_second_connector_s_bytes_are_read_whatever_its_suffix(suffix: str, kind: str, tier: str) -> None:
    """llm-d/llm-d-kv-cache#522: 28 MB through shared storage were nowhere."""
    made = target(SHARED.replace("sharedstorage", suffix).replace("SHARED_STORAGE", kind))
    assert made.store is not None
    assert made.store.totals_by("kv_transfer_bytes", "source", "destination") == {
        ("cpu", "gpu"): 4e6, ("gpu", "cpu"): 2e6, (tier, "gpu"): 2e7, ("gpu", tier): 8e6,
    }  # fmt: skip
    assert made.flags(0.0)["unmapped_label"] is (tier == "unknown")


def counters(prefix: str, tokens: int, more: str = "") -> str:
    names = ("prefix_cache_queries", "prompt_tokens", "generation_tokens", "num_preemptions")
    return f"{prefix}num_requests_running 1\n{more}" + "".join(f"{prefix}{name}_total {tokens}\n" for name in names)


def test_a_rename_in_a_running_process_counts_no_token_twice() -> None:
    """A proxy that rewrites names was put before the engine: same process, same counts."""
    made = target(counters("vllm:", 100), counters("vllm:", 150), counters("vllm_", 170))
    assert made.store is not None
    assert made.store.total("prefix_query_tokens") == 170
    assert made.store.increase is not None
    assert made.store.grown("prefix_query_tokens") == 70


def test_a_rename_with_a_restart_adds_to_what_was_counted() -> None:
    start = "process_start_time_seconds {}\n"
    made = target(counters("vllm:", 100, start.format(5)), counters("acme:", 40, start.format(500)))
    assert made.store is not None
    assert made.store.total("prefix_query_tokens") == 140


def test_a_family_of_another_layer_is_not_taken_for_a_lost_one() -> None:
    """A single foreign name may be anybody's: it isn't read, and it is flagged."""
    text = counters("vllm:", 100).replace("vllm:prompt_tokens_total", "gateway:prompt_tokens_total")
    made = target(text)
    assert made.store is not None
    assert not made.store.has("prompt_tokens")
    assert made.flags(0.0)["renamed_family"]
    assert made.contradictions()["renamed_family"] == "gateway:prompt_tokens_total"


def test_catalogue_check_reads_renamed_families_and_lists_look_alikes() -> None:
    text = counters("acme:", 100) + "acme_edge_num_requests_waiting 3\n"
    found = check(shipped_catalogue().get("vllm"), text.encode(), shipped_catalogue())
    assert found.detected
    assert {one.signal: one.families for one in found.mapped}["prompt_tokens"] == ("acme:prompt_tokens_total",)
    assert any(line.startswith("acme_edge_num_requests_waiting looks like") for line in found.warnings)


@pytest.mark.parametrize("path", sorted(CAPTURES.glob("metrics_*")), ids=lambda path: path.name)
def test_no_real_page_is_renamed(path: Path) -> None:
    body = path.read_bytes()
    names = metric_names(gzip.decompress(body) if path.suffix == ".gz" else body)
    system = shipped_catalogue().detect(names)
    assert system is not None
    followed = follow(system, names)
    assert followed.system is system
    assert followed.renames.not_followed == ()
