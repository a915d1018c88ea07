"""Plans, budgets, identities, and the sealed document."""

from __future__ import annotations

import json
import random
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from prefixwatch.documents.errors import InputError
from prefixwatch.loadgen.audit.document import digest, published_timings, read_audit, sealed
from prefixwatch.loadgen.audit.identity import check_distinct, identity, secrets_of
from prefixwatch.loadgen.audit.plan import AuditSettings, check_budget, power_analysis, prompt, shared_prefix, trials
from prefixwatch.loadgen.audit.samples import Arm


def test_every_arm_is_probed_equally_often_in_random_order() -> None:
    planned = trials(AuditSettings(samples=50, forged=True, emptied=True), random.Random(1))
    assert Counter((trial.arm, trial.emptied) for trial in planned) == {
        (arm, emptied): 50 for arm in Arm for emptied in (False, True)
    }
    firsts = [place for place, trial in enumerate(planned) if trial.arm is Arm.CROSS]
    assert 150 < sum(firsts) / len(firsts) < 250


@pytest.mark.parametrize(("replicas", "victims"), [(1, 1), (2, 5), (8, 23), (16, 47)])
def test_enough_victim_requests_reach_the_probes_replica(replicas: int, victims: int) -> None:
    """B3: so that 95 % of the probes are warm."""
    assert AuditSettings(replicas=replicas).victims == victims
    assert AuditSettings(replicas=replicas, victim_requests=3).victims == 3


def test_the_budget_is_checked_before_anything_is_sent() -> None:
    planned = check_budget(AuditSettings(samples=100, prompt_tokens=2048, pause_seconds=1, rate_per_second=4))
    assert (planned.requests, planned.tokens) == (601, 601 * 2048)
    assert planned.seconds == pytest.approx(601 / 4 + 300)
    order = check_budget(AuditSettings(tests=("order",), order_rounds=10, order_batch=16))
    assert order.requests == 1 + 20 * 17
    for too_low, option in (
        ({"max_requests": 600}, "--max-requests 600: the plan takes 601 requests"),
        ({"max_tokens": 1_000_000}, "--max-tokens 1,000,000: the plan takes 1,230,848 prompt tokens"),
        ({"max_seconds": 60.0}, "--max-seconds 60: the plan takes 450 seconds"),
    ):
        limits: dict[str, Any] = too_low
        with pytest.raises(InputError, match=option):
            check_budget(AuditSettings(**limits))


def test_the_power_analysis_says_what_the_plan_can_find() -> None:
    many = " ".join(power_analysis(AuditSettings(samples=250)))
    assert "find a gap of 0.9 sd with 99 % power at p < 1e-08" in many or "find a gap of 1 sd" in many
    few = " ".join(power_analysis(AuditSettings(samples=5, tests=("timing", "order"))))
    assert "5 + 5 samples find no gap at p < 1e-08: it takes 15 or more" in few
    assert "Order: 10 batches of 16; p is 9e-13" in few


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tests": ("speed",)}, "--tests speed: choose from tokens, timing, order"),
        ({"tests": ()}, "--tests : choose from"),
        ({"samples": 1}, "--samples 1: must be at least 2"),
        ({"replicas": 0}, "--replicas 0: must be at least 1"),
        ({"rate_per_second": float("nan")}, "--rate nan: must be above 0"),
        ({"pause_seconds": -1.0}, "--pause -1: must be 0 or more"),
        ({"shared_part": 0.0}, "--shared-part 0: must be from 0.1 to 1"),
        ({"victim_requests": -2}, "--victim-requests -2: must be 1 or more"),
    ],
)
def test_wrong_settings_name_their_option(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        AuditSettings(**wrong)


def test_a_probe_repeats_its_part_of_the_prompt() -> None:
    rng = random.Random(2)
    sent = prompt(1000, rng)
    probe = prompt(1000, rng, shared_prefix(sent, 0.95))
    same = [mine == theirs for mine, theirs in zip(probe.split(), sent.split(), strict=True)]
    assert all(same[:950])
    assert not all(same[950:])
    assert prompt(1000, rng, shared_prefix(sent, 1.0)) == sent


def test_identities_hold_no_secret_that_could_be_written_down() -> None:
    environment = {"VICTIM": "sk-victim", "SALT": "pepper"}
    victim = identity("acme", headers=["X-Team: blue"], api_key_env="VICTIM", salt="SALT", environment=environment)
    assert victim.headers == {"x-tenant-id": "acme", "x-team": "blue", "authorization": "Bearer sk-victim"}
    assert victim.document() == {
        "headers": {"x-tenant-id": "acme", "x-team": "blue", "authorization": "(secret)"},
        "cache_salt": "from SALT",
    }
    assert "sk-victim" not in repr(victim)
    assert "pepper" not in repr(victim)
    assert secrets_of(victim) == ["sk-victim", "pepper"]
    one, other = (identity(name, salt="random") for name in ("a", "b"))
    assert len({one.salt, other.salt, ""}) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"headers": ["no colon"]}, "header 'no colon' of acme: write it as 'NAME: VALUE'"),
        ({"headers": ["Authorization: Bearer sk-1"]}, r"header Authorization of acme: its value is a secret"),
        ({"headers": ["X: a\r\nY: b"]}, "write it as 'NAME: VALUE'"),
        ({"api_key_env": "ABSENT"}, "environment variable ABSENT is not set"),
        ({"salt": "ABSENT"}, "environment variable ABSENT is not set: put the salt of acme into it"),
    ],
)
def test_wrong_identities_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        identity("acme", environment={}, **options)


def test_a_tenant_is_not_compared_with_itself() -> None:
    with pytest.raises(InputError, match="victim and attacker send the same headers and salt"):
        check_distinct(identity("acme"), identity("acme"))
    check_distinct(identity("acme", salt="random"), identity("acme", salt="random"))


CONTENT = {"kind": "prefixwatch isolation audit", "version": 1, "name": "Zoë", "p_value": 8.565727532410956e-150}


def test_a_changed_document_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "audit.json"
    file.write_text(json.dumps(sealed(CONTENT), indent=3), encoding="utf-8")
    assert read_audit(file) == CONTENT
    assert sealed(CONTENT)["sha256"] == digest(json.loads(json.dumps(dict(reversed(CONTENT.items())))))
    file.write_text(json.dumps({**sealed(CONTENT), "audit": {**CONTENT, "p_value": 0.5}}), encoding="utf-8")
    with pytest.raises(InputError, match="was changed after it was written"):
        read_audit(file)
    for text, message in (("[1]", "is not an audit.json"), ("{", "is not JSON"), ('{"audit": 1}', "is not an audit")):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=message):
            read_audit(file)


def test_published_timings_are_read_from_a_file_a_folder_and_an_archive(tmp_path: Path) -> None:
    times = [{"client_time": 0.1 + place / 100} for place in range(20)]
    whole = json.dumps({"cache_hit": times, "cache_miss": [*times, {"client_time": None}]})
    file = tmp_path / "data" / "global" / "one.json"
    file.parent.mkdir(parents=True)
    file.write_text(whole, encoding="utf-8")
    (file.parent / "few.json").write_text(json.dumps({"cache_hit": times[:5], "cache_miss": times}), encoding="utf-8")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/global/one.json", whole)
        archive.writestr("__MACOSX/one.json", "{")
    assert list(published_timings(file)) == ["one.json"]
    assert list(published_timings(tmp_path / "data")) == ["global/one.json"]
    assert list(published_timings(tmp_path / "data.zip")) == ["data/global/one.json"]
    file.write_text(json.dumps({"cache_hit": [{}], "cache_miss": times}), encoding="utf-8")
    with pytest.raises(InputError, match="needs a client_time"):
        published_timings(file)
