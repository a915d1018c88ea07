"""Families of what the exporter itself does: its probes, the spans that it receives, its scrapes and pages.

They are a part of the table in `exporters.metrics_page.families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Kind = Literal["counter", "gauge", "histogram", "summary", "unknown"]
Table = Mapping[str, tuple[tuple[Kind, str, str, tuple[str, ...]], ...]]
"""By group: kind, name, help text and the labels that are given."""

_T = ("target",)

OWN: Table = {
    "probes": (
        ("histogram", "probe_ttft_seconds", "Time to first token of a probe's cold prompt and of its repeat.",
         ("target", "temperature")),
        ("counter", "probe_requests",
         "Probe requests by outcome; skipped: not sent because requests were waiting or the budget was spent.",
         ("target", "outcome")),
        ("counter", "probe_tokens",
         "Tokens of the completed probes, by kind: prompt, cached (as reported; of a repeat whose answer reports none, "
         "its whole prompt). Engines count them among their lookups and hits.", ("target", "model", "kind")),
        ("gauge", "probe_cached_tokens", "Cached tokens reported for the last probe's prompt and its repeat.",
         ("target", "temperature")),
        ("gauge", "probe_prompt_tokens", "Prompt tokens reported for the last probe.", _T),
        ("counter", "probe_canaries",
         "Prompts of one tenant repeated as another tenant, by result: miss (isolated) or hit (a leak).",
         ("target", "result")),
        ("gauge", "probe_finding",
         "1 if the latest probes of the target found this, 0 if they did not: caching_off, "
         "cached_tokens_unreported, repeat_not_faster, hits_not_faster, hits_not_counted, cold_prompt_hit, "
         "cross_tenant_hit.", ("target", "finding")),
    ),
    "spans": (
        ("counter", "otlp_exports", "Trace exports received, by HTTP status of the response.", ("code",)),
        ("counter", "spans",
         "Spans received, by result: used (a request), merged (into another span's request), other (not a model "
         "call), duplicate, late, elsewhere (reported by the router's own records), refused.", ("result",)),
        ("counter", "span_faults", "Spans refused and span values dropped, by fault.", ("fault",)),
    ),
    "exporter": (
        ("gauge", "data_quality", "1 while this flag warns that the target's numbers may mislead; absent otherwise.",
         ("target", "flag")),
        ("gauge", "data_quality_checks", "Data-quality flags that could be evaluated, of all targets.", ()),
        ("gauge", "missing_signal", "1 for a required signal that is missing from the target's page under all names.",
         ("target", "signal")),
        ("gauge", "unread_families",
         "Families on targets' pages that look like cache, queue, latency or token signals and are not read.",
         ("system",)),
        ("gauge", "labels_overflowed",
         "Label values of the target's page beyond limits.label_values, merged into the value other.",
         ("target", "label")),
        ("gauge", "target_up", "1 if the last scrape returned metrics of a known system.",
         ("target", "system", "version")),
        ("gauge", "window_seconds",
         "Current length of the target's window; absent while rates and ratios over it are unknown.", _T),
        ("counter", "scrapes", "Scrapes of the target, successful or not.", _T),
        ("counter", "scrape_failures", "Failed scrapes by reason.", ("target", "reason")),
        ("gauge", "scrape_duration_seconds", "Duration of the last scrape.", _T),
        ("gauge", "scrape_samples", "Samples taken from the last pages of all targets.", ()),
        ("gauge", "scrape_age_seconds", "Time since the last successful scrape.", _T),
        ("gauge", "build_info", "Version of the exporter and of Python; always 1.", ("version", "python")),
        ("counter", "pages", "Metrics pages written.", ()),
        ("counter", "page_cpu_seconds", "CPU time spent on writing metrics pages.", ()),
        ("gauge", "page_bytes", "Size of the last metrics page before compression.", ()),
        ("gauge", "discovered_targets", "Targets found, by discovery.", ("discovery",)),
        ("counter", "discovery_failures", "Failed refreshes, by discovery.", ("discovery",)),
        ("gauge", "config_last_reload_successful", "1 if the last reload of the configuration was accepted.", ()),
    ),
}  # fmt: skip
