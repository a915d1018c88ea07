"""What field reports teach stands on the page that somebody reads when it happens."""

from __future__ import annotations

import pytest

from prefixwatch.runbooks.page import shipped_runbooks

PAGES = shipped_runbooks().pages


@pytest.mark.parametrize(
    ("report", "alert", "section", "says"),
    [
        ("EM03", "DataQualityMisleading", "Meaning", "half the external ratio (vllm-project/vllm#28585)"),
        ("EM06", "PrefixHitRateLow", "Evidence", "floor(shared / block size) × block size is the ceiling, 0 for 240"),
        ("EM14", "DataQualityMisleading", "Meaning", "one data-parallel rank in eight (sgl-project/sglang#6892)"),
        ("EM17", "MetricsEndpointFailing", "Evidence", "a network volume or isn't writable (vllm-project/vllm#49983)"),
        (
            "EM48",
            "DataQualityMisleading",
            "Evidence",
            "only the first won (ai-dynamo/nixl#1838); values are not scaled",
        ),
        ("RT24", "InFlightUndercount", "Meaning", "588 believed, 1,029 real (llm-d/llm-d-router#2295)"),
        ("RT26", "InFlightLeak", "Evidence", "A plateau at exactly 100 is a client's connection pool"),
        ("RT31", "WorkerSlow", "Evidence", "A proxy that buffers the stream has it the other way round"),
        ("RT43", "WorkerHotspot", "Evidence", "each router replica sees only its share of the requests"),
        ("SL04", "SloTooFewEventsToJudge", "Meaning", "vonrobak/fedora-homelab-containers#165"),
        ("SL18", "DiscoveryEmpty", "Meaning", "a label or port that doesn't match looks just like an empty fleet"),
        (
            "LT02",
            "SessionPrefixHitRateLow",
            "Evidence",
            "text that is tokenized again differs from what was generated",
        ),
        ("LT10", "WorkerSlow", "Evidence", "The client's own CPU governor can look just so from outside"),
        (
            "LT21",
            "PrefillWaitLong",
            "Evidence",
            "a proxy's connection pool (vllm-project/production-stack#767), not the",
        ),
    ],
)
def test_a_page_says_it(report: str, alert: str, section: str, says: str) -> None:
    text = " ".join(PAGES[alert].sections[section].split())
    assert says in text, report
