"""Rules that every shipped dashboard keeps; each is a defect that was shipped somewhere."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from prefixwatch.dashboards.build import RUNBOOKS
from prefixwatch.dashboards.definition import EVERYWHERE, Panel, shipped
from prefixwatch.dashboards.grafana.classic import targets
from prefixwatch.dashboards.queries.expressions import metrics_of, recorded, recording_rules
from prefixwatch.dashboards.queries.inventory import ANNOTATION, VARIABLE, Shown, everything_asked
from prefixwatch.dashboards.queries.threshold_lines import threshold
from prefixwatch.exporters.metrics_page.families import FAMILIES
from prefixwatch.runbooks.page import shipped_runbooks
from tests.alerts.hygiene import Names, exporter_names, faults, metrics
from tests.dashboards.drawn import PANELS, models, panels_of
from tests.dashboards.not_shown import not_shown

HISTOGRAMS = {family.full_name for family in FAMILIES.values() if family.kind == "histogram"}
LATENCIES = re.compile(
    r"(cold|warm)_prefill_time|async_prefill_wait"
    r"|prefixwatch_(ttft|ttft_by_length|tenant_ttft|tpot|e2e|cold_prefill|warm_prefill|prefill_wait)_seconds\b"
)


@cache
def names() -> Names:
    """Series, with the labels that the scraping Prometheus adds, and those that alerts carry."""
    base = exporter_names(recorded())
    labels = {name: (*own, "cluster") for name, own in base.labels.items()}
    return Names({**labels, "ALERTS": (*labels["ALERTS"], "group", "slo", "target", "tenant")}, base.counters)


def test_every_name_exists_counters_are_rated_and_divisions_are_guarded() -> None:
    """vllm-project/production-stack#989, llm-d/llm-d#546, sgl-project/sglang#33796 (SL14): no unknown metric."""
    found = [
        f"{one}: {fault}"
        for one in everything_asked()
        if one.kind != "label values"
        for fault in faults(Shown().expanded(one.expr), names())
    ]

    assert found == []


def test_no_panel_has_a_range_of_its_own() -> None:
    """linkerd/linkerd2#9509, grafana/mimir#2011 (SL07): a fixed range is empty where scrapes are further apart."""
    ranges = [(str(one), each) for one in everything_asked() for each in re.findall(r"\[([^\]]*)\]", one.expr)]

    assert [pair for pair in ranges if pair[1] not in {"$__rate_interval", "$__range"}] == []


@pytest.mark.parametrize("scrape_seconds", [5.0, 15.0, 60.0])
def test_a_range_holds_four_scrapes_whatever_the_zoom(scrape_seconds: float) -> None:
    """weka/csi-wekafs#741 (SL08): 15 minutes of a target that is scraped once a minute draw every panel."""
    shown = Shown(range_seconds=900.0, scrape_seconds=scrape_seconds)

    [milliseconds] = re.findall(r"\[(\d+)ms\]", shown.expanded("rate(up[$__rate_interval])"))

    assert int(milliseconds) >= 4000 * scrape_seconds


def test_every_query_follows_the_scrape_interval_that_is_chosen() -> None:
    """SL08, the other half: the datasource's declared interval may be wrong, the dashboard's variable wins."""
    for model in models().values():
        assert {target["interval"] for _, target in targets(model["panels"])} == {"${scrape}"}
        assert "scrape" in {variable["name"] for variable in model["templating"]["list"]}


def test_every_datasource_is_the_variable() -> None:
    """sgl-project/sglang#2677 (SL13): after an import elsewhere a fixed uid is an empty page."""
    for name, model in models().items():
        uids = set(re.findall(r'"datasource": \{"type": "prometheus", "uid": "([^"]*)"\}', json.dumps(model)))
        assert uids == {"${datasource}"}, name
        assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels_of(model))
        assert all(target["datasource"]["uid"] == "${datasource}" for _, target in targets(model["panels"]))
        assert all(each["datasource"]["uid"] == "${datasource}" for each in model["annotations"]["list"])


def test_variables_are_refreshed_and_name_no_instance() -> None:
    """`instance="$instance"` goes blank with a restart: all is a pattern, and values are asked for anew."""
    for model in models().values():
        for variable in model["templating"]["list"]:
            if variable["type"] == "query":
                assert variable["refresh"] == 2
                assert variable["allValue"] == ".*"
                assert variable["includeAll"]
        exprs = " ".join(target["expr"] for _, target in targets(model["panels"]))
        assert not re.search(r"\binstance\s*[=!]", exprs)


def test_every_selector_is_filtered_by_the_dashboards_variables() -> None:
    for one in everything_asked():
        if one.panel not in {ANNOTATION, VARIABLE}:
            selectors = re.findall(r"(?:prefixwatch_\w+|up)\{([^}]*)\}", one.expr)
            assert all('cluster=~"$cluster"' in each and 'job=~"$job"' in each for each in selectors), one
            used = set(re.findall(r"\$(\w+)", one.expr)) - {"__rate_interval", "__range", *EVERYWHERE}
            assert used <= set(shipped()[one.dashboard].variables), one


def test_every_panel_has_what_a_reader_needs() -> None:
    for model in models().values():
        for panel in panels_of(model):
            defaults = panel["fieldConfig"]["defaults"]
            assert panel["title"]
            assert defaults["unit"]
            assert defaults["noValue"]
            assert "\n\nMetric: `" in panel["description"]
            assert f"No data: {defaults['noValue']}" in panel["description"]


def test_numbers_and_titles_are_each_given_once() -> None:
    for name, model in models().items():
        rows = [panel for panel in model["panels"] if panel["type"] == "row"]
        ids = [panel["id"] for panel in [*rows, *panels_of(model)]]
        assert sorted(ids) == list(range(1, len(ids) + 1)), name
        twice = [title for title, count in Counter(p["title"] for p in panels_of(model)).items() if count > 1]
        assert twice == [], name


def test_panels_neither_overlap_nor_leave_the_grid() -> None:
    for name, model in models().items():
        cells: Counter[tuple[int, int]] = Counter()
        for panel in [*model["panels"], *(p for row in model["panels"] for p in row.get("panels", ()))]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            if panel not in model["panels"]:
                continue  # of a collapsed row: placed when it is opened
            cells.update(
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            )
        assert max(cells.values()) == 1, name


def test_a_bar_of_per_cent_knows_its_ends() -> None:
    """Without them a bar gauge scales itself and draws 49, 26 and 24 % as 90, 12 and 6 %."""
    bars = [(n, p) for n, p in PANELS if p.kind == "bargauge" and p.unit == "percentunit"]

    assert bars
    assert [(name, panel.title) for name, panel in bars if (panel.minimum, panel.maximum) != (0, 1)] == []


def test_a_ratio_is_a_ratio_and_a_gauge_says_when_it_was_taken() -> None:
    """vllm-project/vllm#20302, gpustack/gpustack#5703 (EM41): 0 to 1, threshold 0.9, sampled at the scrape."""
    [panel] = [p for _, p in PANELS if p.title == "KV cache in use"]

    assert (panel.unit, panel.minimum, panel.maximum) == ("percentunit", 0, 1)
    assert "sampled at the scrape" in panel.about
    assert threshold(panel.lines[0], "").value == 0.9


def test_engines_own_printed_rates_are_never_shown() -> None:
    """inference-sim/inference-sim#1726 (EM47), sgl-project/sglang#26608 (EM11)."""
    assert [p.title for _, p in PANELS for q in p.queries if "prefix_cache_hit_ratio" in q.expr] == []


def test_grafana_lists_the_dashboards_in_the_order_of_a_diagnosis() -> None:
    titles = [model["title"] for model in models().values()]

    assert sorted(titles) == titles


def test_latency_never_stands_without_the_share_of_refused_requests() -> None:
    """A fleet that refuses half of its requests shows excellent latencies (SL20)."""
    for name, dashboard in shipped().items():
        for row in dashboard.rows:
            timed = [panel for panel in row.panels if panel.unit == "s" and LATENCIES.search(_text(panel))]
            refused = [panel for panel in row.panels if 'outcome="refused"' in _text(panel)]
            assert refused or not timed, f"{name}: {row.title}"


def _text(panel: Panel) -> str:
    return " ".join(query.expr for query in panel.queries)


def test_quantiles_beyond_the_buckets_say_so() -> None:
    """vllm-project/vllm#15202 (EM22): a p99 that equals the highest bound is that, or anything above it."""
    [panel] = [p for p in panels_of(models()["cold-prefill"]) if p["title"] == "Cold and warm prefills"]

    mapping = panel["fieldConfig"]["defaults"]["mappings"][1]

    assert mapping == {
        "type": "range",
        "options": {"from": 600.0, "to": 600.0, "result": {"text": "≥ 600 s: beyond the buckets", "index": 1}},
    }


def test_every_quantile_reads_classic_and_native_histograms() -> None:
    """grafana/jsonnet-libs#1121, grafana/mimir#10052 (SL11): half a fleet on native histograms isn't left out."""
    for one in everything_asked():
        if "histogram_quantile" in one.expr:
            classic_names = {n.removesuffix("_bucket") for n in metrics_of(one.expr) if n.endswith("_bucket")}
            assert classic_names <= set(metrics_of(one.expr)), one


def test_every_count_of_a_histogram_reads_classic_and_native_ones() -> None:
    """The same (SL11) of what isn't a quantile: a native histogram has no `_count` and no `_bucket`."""
    counted = re.compile("(.+)_(?:count|bucket)")
    for one in everything_asked():
        read = set(metrics_of(one.expr))
        families = {found[1] for name in read if (found := counted.fullmatch(name)) and found[1] in HISTOGRAMS}
        assert families <= read, one


def test_every_link_leads_somewhere() -> None:
    pages, uids = shipped_runbooks().pages, {dashboard.uid for dashboard in shipped().values()}
    for model in models().values():
        for panel in panels_of(model):
            for link in panel["links"]:
                runbook = re.fullmatch(r"\$\{runbooks\}/(\w+)\.md", link["url"])
                onward = re.match(r"/d/([a-z-]+)\?", link["url"])
                assert (runbook and runbook[1] in pages) or (onward and onward[1] in uids), link


def test_alerts_are_marked_in_the_panels_of_their_group() -> None:
    for name, dashboard in shipped().items():
        exprs = [one.expr for one in everything_asked() if one.dashboard == name and one.panel == ANNOTATION]
        assert len(exprs) == 2
        assert all(f'group=~"{"|".join(dashboard.groups)}"' in exprs[0] for _ in dashboard.groups)


def _shown() -> set[str]:
    """Series on panels, families whose samples are, and what is recorded from nothing but these."""
    read = {metric for one in everything_asked() for metric in metrics_of(one.expr)}
    families = {re.sub("_(bucket|count|sum)$", "", name) for name in read} | read
    return families | {rule.name for rule in recording_rules() if _families(rule.expr) <= families | {"up"}}


def _families(expr: str) -> set[str]:
    return {re.sub("_(bucket|count|sum)$", "", name) for name in metrics(expr)}


def test_every_exported_family_and_recorded_series_is_shown_or_listed_with_a_reason() -> None:
    wanted = [*(family.full_name for family in FAMILIES.values()), *recorded()]

    assert sorted({*wanted} - _shown() - {*not_shown()}) == []


def test_what_is_listed_as_not_shown_isnt_shown() -> None:
    assert sorted(set(not_shown()) & _shown()) == []


def test_titles_and_texts_name_no_machine() -> None:
    """But the exporter, once, where the runbooks are by default."""
    for path in Path("dashboards/json").glob("*.json"):
        text = path.read_text(encoding="utf-8").replace(f'"query": "{RUNBOOKS}"', "", 1)
        assert not re.search(r"https?://|localhost|/home/|/root/", text), path


def test_the_routers_reasons_stand_beside_the_hit_ratio() -> None:
    """sgl-project/sglang#32195 (RT06): affinity that is dropped under load shows in both at once."""
    row = shipped()["router-affinity"].rows[0]

    assert [panel.title for panel in row.panels][:2] == ["Which reasons decide?", "How much of the prompts is reused?"]


def test_first_tokens_from_arrival_stand_beside_the_engines_own() -> None:
    """llm-d/llm-d-inference-sim#266 (SL16), llm-d/llm-d-router#1109 (RT36): the gap is what waits outside."""
    [panel] = [p for _, p in PANELS if p.title == "What do the router and the queue add?"]

    legends = [query.legend for query in panel.queries]
    assert legends == ["from arrival, p95", "median engine's own, p95", "slowest engine's own, p95"]
