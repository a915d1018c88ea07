"""The claims, in order."""

from __future__ import annotations

from benchmarks.claims import (
    a01_load_term,
    a02_collapse,
    a03_beta_knee,
    a05_hit_bounds,
    a08_precise_routing,
    a14_cachegen,
    a18_refusals,
    a20_paced_sessions,
    a22_decode_bound,
    c01_pool,
    c02_tiers,
    c03_far_prefill,
)
from benchmarks.claims.claim import Claim

CLAIMS: dict[str, Claim] = {
    module.CLAIM.id: module.CLAIM
    for module in (
        a01_load_term,
        a02_collapse,
        a03_beta_knee,
        a05_hit_bounds,
        a08_precise_routing,
        a14_cachegen,
        a18_refusals,
        a20_paced_sessions,
        a22_decode_bound,
        c01_pool,
        c02_tiers,
        c03_far_prefill,
    )
}
