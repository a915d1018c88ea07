"""`prefixwatch audit`: can one tenant see what another sent? Measured, not assumed."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from prefixwatch.loadgen.audit.document import KIND, VERSION, published_timings, read_audit, sealed
from prefixwatch.loadgen.audit.findings import State, Verdict, judge
from prefixwatch.loadgen.audit.identity import Identity, check_distinct, identity
from prefixwatch.loadgen.audit.plan import AuditSettings, check_budget, power_analysis
from prefixwatch.loadgen.audit.price import Prices, price
from prefixwatch.loadgen.audit.samples import Samples
from prefixwatch.loadgen.audit.sending import AuditRun
from prefixwatch.loadgen.audit.statistics import LEAK_LEVEL, separation
from prefixwatch.stack.audit.consent import check_allowed
from prefixwatch.stack.audit.engines import Engines, lost_hit_tokens
from prefixwatch.stack.audit.page import render_audit
from prefixwatch.stack.cli.command import (
    JsonFlag,
    command,
    finish,
    load_option,
    names,
    new_app,
    output_option,
    plain_console,
    target_option,
)
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.out_folder import make_out_folder, write_text
from prefixwatch.stack.local.targets import Endpoint, served_model

app = new_app(no_args_is_help=True, help="Audits of a running target: isolation of its tenants' caches.")

_DEFAULTS = AuditSettings()
_STYLES = {State.LEAK: "red", State.ISOLATED: "green", State.INCONCLUSIVE: "yellow", State.UNAVAILABLE: "dim"}


@dataclass(frozen=True, slots=True)
class IsolationOptions:
    """Options of `prefixwatch audit isolation`."""

    target: Annotated[str, target_option(help="OpenAI-compatible endpoint: http://HOST:PORT.", show_default=False)]
    engine: Annotated[
        list[str] | None, target_option(help="An engine behind it: its counters say which tier served a probe.")
    ] = None
    model: Annotated[str | None, target_option(help="Model; default: the first that the target lists.")] = None
    i_may_test_this: Annotated[
        bool, target_option("--i-may-test-this", help="Consent: needed for every host but this one.")
    ] = False
    allow_host: Annotated[
        list[str] | None, target_option(help="A host beyond loopback that may be sent to; repeatable.")
    ] = None
    tenant_header: Annotated[str, target_option(help="Header that names the tenant; empty: none.")] = "x-tenant-id"
    victim: Annotated[str, target_option(help="The victim's tenant name.")] = "audit-victim"
    attacker: Annotated[str, target_option(help="The attacker's tenant name.")] = "audit-attacker"
    victim_header: Annotated[
        list[str] | None, target_option(help="A header of the victim, 'NAME: VALUE'; secrets as ${VARIABLE}.")
    ] = None
    attacker_header: Annotated[list[str] | None, target_option(help="A header of the attacker.")] = None
    victim_key_env: Annotated[str, target_option(help="Environment variable with the victim's API key.")] = ""
    attacker_key_env: Annotated[str, target_option(help="Environment variable with the attacker's API key.")] = ""
    victim_salt: Annotated[
        str, target_option(help="cache_salt that the victim sends: 'random', or the variable that holds it.")
    ] = ""
    attacker_salt: Annotated[str, target_option(help="The same of the attacker.")] = ""
    forge_salt: Annotated[
        bool, load_option("--forge-salt", help="Also probe as the attacker with the victim's salt in the body.")
    ] = False
    tests: Annotated[str, load_option(help="Tests, comma-separated: tokens, timing, order.")] = "tokens,timing"
    samples: Annotated[int, load_option(help="Probes per arm.")] = _DEFAULTS.samples
    prompt_tokens: Annotated[int, load_option(help="Length of a prompt.")] = _DEFAULTS.prompt_tokens
    replicas: Annotated[int, load_option(help="Engines that the target spreads requests over.")] = 1
    victim_requests: Annotated[int, load_option(help="Requests before each probe; 0: enough for --replicas.")] = (
        _DEFAULTS.victim_requests
    )
    shared_part: Annotated[float, load_option(help="Part of the prompt that a probe repeats.")] = _DEFAULTS.shared_part
    pause: Annotated[float, load_option(help="Seconds between them and the probe.")] = _DEFAULTS.pause_seconds
    empty_engine_caches: Annotated[
        bool,
        load_option(
            "--empty-engine-caches",
            help="Also probe after POST /reset_prefix_cache to each --engine, so that only outer tiers can serve.",
        ),
    ] = False
    order_rounds: Annotated[int, load_option(help="Batches per arm of the order test.")] = _DEFAULTS.order_rounds
    order_batch: Annotated[int, load_option(help="Requests in a batch, sent at once.")] = _DEFAULTS.order_batch
    rate: Annotated[float, load_option(help="Most requests per second.")] = _DEFAULTS.rate_per_second
    max_requests: Annotated[int, load_option(help="Budget of requests.")] = _DEFAULTS.max_requests
    max_tokens: Annotated[int, load_option(help="Budget of prompt tokens.")] = _DEFAULTS.max_tokens
    max_seconds: Annotated[float, load_option(help="Budget of time.")] = _DEFAULTS.max_seconds
    plan: Annotated[bool, load_option("--plan", help="Print cost and power, and send nothing.")] = False
    gpus_per_worker: Annotated[int | None, output_option(help="For the price: GPUs of one engine.")] = None
    gpu_hour_price: Annotated[float | None, output_option(help="For the price: what a GPU costs per hour.")] = None
    exporter: Annotated[
        str | None, output_option(help="For the price: a prefixwatch exporter that counts the reuse lost to salts.")
    ] = None
    out: Annotated[Path, output_option(help="Folder for audit.json and audit.html.")] = Path("results/audit")
    as_json: JsonFlag = False

    def settings(self) -> AuditSettings:
        """Raises InputError."""
        return AuditSettings(
            samples=self.samples,
            prompt_tokens=self.prompt_tokens,
            victim_requests=self.victim_requests,
            replicas=self.replicas,
            shared_part=self.shared_part,
            pause_seconds=self.pause,
            tests=tuple(names(self.tests)),
            forged=self.forge_salt,
            emptied=self.empty_engine_caches,
            order_rounds=self.order_rounds,
            order_batch=self.order_batch,
            rate_per_second=self.rate,
            max_requests=self.max_requests,
            max_tokens=self.max_tokens,
            max_seconds=self.max_seconds,
        )

    def identities(self) -> tuple[Identity, Identity]:
        """Victim and attacker. Raises InputError."""
        victim = identity(
            self.victim,
            tenant_header=self.tenant_header,
            headers=self.victim_header or (),
            api_key_env=self.victim_key_env,
            salt=self.victim_salt,
        )
        attacker = identity(
            self.attacker,
            tenant_header=self.tenant_header,
            headers=self.attacker_header or (),
            api_key_env=self.attacker_key_env,
            salt=self.attacker_salt,
        )
        check_distinct(victim, attacker)
        return victim, attacker


@command(app, "isolation")
def isolation(options: IsolationOptions) -> None:
    """Find out whether one tenant can see, by cached tokens or by time, what another sent. 0 isolated, 1 leak, 3
    inconclusive, 2 wrong input.

    Prompts are random letters. Nothing is sent beyond this machine without --i-may-test-this and --allow-host.

    Example: `prefixwatch audit isolation --target http://localhost:8000 --engine http://localhost:8001`
    """
    console = plain_console(stderr=options.as_json)
    settings = options.settings()
    engines = options.engine or []
    check_allowed([options.target, *engines], options.allow_host or [], consent=options.i_may_test_this)
    if settings.forged and not options.victim_salt:
        raise UsageError("--forge-salt: give the victim's salt, too: --victim-salt VARIABLE")
    if settings.emptied and not engines:
        raise UsageError("--empty-engine-caches: name the engines, too: --engine URL")
    planned, power = check_budget(settings), power_analysis(settings)
    console.print(
        f"Plan: {planned.requests:,} requests, {planned.tokens:,} prompt tokens, at least {planned.seconds:,.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    for sentence in power:
        console.print(sentence, highlight=False, soft_wrap=True)
    if options.plan:
        finish({"plan": asdict(planned), "power": power}, 0, as_json=options.as_json)
    document, verdict = run_audit(options, settings, power, console)
    print_verdict(verdict, console)
    console.print(f"Report: {options.out / 'audit.html'}", soft_wrap=True, highlight=False)
    finish(document, verdict.exit_code, as_json=options.as_json)


def run_audit(
    options: IsolationOptions, settings: AuditSettings, power: Sequence[str], console: Console
) -> tuple[dict[str, Any], Verdict]:
    """Send the plan, judge it, write `audit.json` and `audit.html`. Raises InputError."""
    victim, attacker = options.identities()
    folder = make_out_folder(options.out)
    key = options.attacker_key_env
    model = asyncio.run(served_model(Endpoint(options.target, key), options.model))
    lost = lost_hit_tokens(options.exporter) if options.exporter else None
    caches = Engines(options.engine) if options.engine else None
    try:
        if caches is not None:
            caches.check()
            if settings.emptied:
                caches.empty()
        with console.status("sending …") as status:
            samples = AuditRun.to(
                options.target,
                model=model,
                victim=victim,
                attacker=attacker,
                settings=settings,
                rng=random.Random(secrets.randbits(128)),
                caches=caches,
                progress=lambda done, of: status.update(f"probe {done + 1:,} of {of:,} …"),
            ).send()
    finally:
        if caches is not None:
            caches.close()
    verdict = judge(samples, settings)
    content = {
        "kind": KIND,
        "version": VERSION,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": options.target,
        "engines": list(options.engine or []),
        "model": model,
        "consent": f"given; allowed hosts: {', '.join(options.allow_host or [])}"
        if options.i_may_test_this
        else "not needed: loopback only",
        "victim": victim.document(),
        "attacker": attacker.document(),
        "settings": settings.document(),
        "power": list(power),
        "verdict": verdict.state,
        "statement": verdict.statement,
        "remedies": verdict.remedies,
        "findings": [asdict(finding) for finding in verdict.findings],
        "price": price(samples, Prices(options.gpus_per_worker, options.gpu_hour_price, lost)).document(),
        "samples": samples.document(),
    }
    document = sealed(content)
    write_text(folder / "audit.json", json.dumps(document, indent=1, ensure_ascii=False) + "\n", "--out")
    write_text(folder / "audit.html", render_audit(document), "--out")
    return document, verdict


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Each finding, then what they say together."""
    table = Table("test", "tier", "finding", "says")
    for each in verdict.findings:
        forged = " (forged salt)" if each.arm == "forged" else ""
        table.add_row(each.test + forged, each.tier, f"{each.state}", each.says, style=_STYLES[each.state])
    console.print(table)
    console.print(verdict.statement, soft_wrap=True, highlight=False)
    for remedy in verdict.remedies:
        console.print(f"To do: {remedy}.", soft_wrap=True, highlight=False)


@command(app, "regrade")
def regrade(
    path: Annotated[
        Path, typer.Argument(help="audit.json; or published timings: a .json file, a folder or a .zip of them.")
    ],
    as_json: JsonFlag = False,
) -> None:
    """Check an audit's seal and judge its samples again, or run the timing test on published audit data.

    Example: `prefixwatch audit regrade results/audit/audit.json`
    """
    console = plain_console(stderr=as_json)
    if not path.exists():
        raise UsageError(f"{path}: there is no such file or folder")
    published = published_timings(path)
    if published:
        finish(_published(published, console), 0, as_json=as_json)
    if path.is_dir():
        raise UsageError(f"{path} holds no published timings: name an audit.json, or a folder of files with cache_hit")
    content = read_audit(path)
    settings = AuditSettings(**content["settings"])
    verdict = judge(Samples.from_document(content["samples"]), settings)
    print_verdict(verdict, console)
    if verdict.state != content["verdict"]:
        console.print(f"The file says {content['verdict']}: another version of prefixwatch judged it.", soft_wrap=True)
    finish({"verdict": verdict.state, "statement": verdict.statement}, verdict.exit_code, as_json=as_json)


def _published(timings: dict[str, Any], console: Console) -> dict[str, Any]:
    """One row per audit; the leaks by level, which is the folder that a file is in."""
    table = Table("audit", "p", "AUC", "95 %", "hit ms", "miss ms")
    rows, audits, leaks = [], Counter[str](), Counter[str]()
    for name, (hits, misses) in timings.items():
        found = separation(hits, misses)
        level = Path(name).parent.name or "-"
        audits[level] += 1
        leaks[level] += found.p_value < LEAK_LEVEL
        medians = [f"{value * 1e3:,.0f}" for value in (found.median_first, found.median_second)]
        limits = f"{found.auc_low:.2f} … {found.auc_high:.2f}"
        table.add_row(Path(name).stem, f"{found.p_value:.2g}", f"{found.auc:.3f}", limits, *medians)
        rows.append({"audit": name, **asdict(found)})
    console.print(table)
    for level in sorted(audits):
        console.print(f"{level}: {leaks[level]} of {audits[level]} below p = {LEAK_LEVEL:g}", highlight=False)
    return {"levels": {name: {"audits": audits[name], "leaks": leaks[name]} for name in sorted(audits)}, "audits": rows}
