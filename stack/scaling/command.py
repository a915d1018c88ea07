"""`prefixwatch scale-advice`: how many workers, which of them may go, and who would take over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from rich import box
from rich.table import Table

from prefixwatch.stack.cli.command import JsonFlag, new_app, output_option, plain_console, print_json, target_option
from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.local.access import read_json

app = new_app(invoke_without_command=True)

_UNKNOWN = "unknown"
ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"


@app.callback()
def scale_advice(
    exporter: Annotated[
        str | None, target_option(help="URL of an exporter; default: http://127.0.0.1:9477.", show_default=False)
    ] = None,
    target_load: Annotated[
        float | None,
        target_option(
            help="Requests that one worker takes within its objectives, instead of exporter.scaling's; the advice is "
            "then for this moment, without hysteresis.",
            show_default=False,
        ),
    ] = None,
    kubectl: Annotated[
        bool, output_option("--kubectl", help="Print the commands that give each pod its deletion cost.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print whether to add workers or to remove one, what its cache is worth, who would absorb it, and the drain order.

    Example: `prefixwatch scale-advice --exporter http://127.0.0.1:9477 --target-load 8`

    Example: `prefixwatch scale-advice --kubectl | sh` (pods that are cheapest to lose are deleted first)
    """
    if kubectl and as_json:
        raise UsageError("give either --kubectl or --json, not both")
    if target_load is not None and not 0 < target_load < 1e9:
        raise UsageError(f"--target-load must be above 0, got {target_load:g}")
    found = read_advice((exporter or "http://127.0.0.1:9477").rstrip("/"), target_load)
    if as_json:
        print_json(found)
    elif kubectl:
        for line in pod_annotations(found):
            print(line)
    else:
        _show(found)


def read_advice(base: str, target_load: float | None) -> dict[str, Any]:
    """The exporter's `/api/v1/scaling`. Raises UsageError naming the option that is wrong."""
    url = f"{base}/api/v1/scaling" + ("" if target_load is None else f"?target_load={target_load:g}")
    found = read_json(url, "--exporter")
    if found.get("schema") != 1 or "groups" not in found:
        raise UsageError(f"--exporter: {url}: the answer is not scaling advice of schema 1")
    return found


def pod_annotations(found: Mapping[str, Any]) -> Iterator[str]:
    """A command for each pod whose cache is known: Kubernetes deletes pods of low cost first."""
    for group in found["groups"]:
        for worker in group["drain_order"]:
            if "lost_hit_tokens" in worker:
                where = f" -n {worker['namespace']}" if "namespace" in worker else ""
                yield f"kubectl annotate pod {worker['pod']}{where} {ANNOTATION}={worker['deletion_cost']} --overwrite"


def _show(found: Mapping[str, Any]) -> None:
    console = plain_console()
    if not found["groups"]:
        console.print(f"No advice: {found.get('why', _UNKNOWN)}.", soft_wrap=True)
    for group in found["groups"]:
        named = ", ".join(f"{label} {value}" for label, value in group["peers"].items()) or "all workers"
        console.print(f"{named}: {_sentence(group)}", soft_wrap=True)
        console.print(_table(group))


def _sentence(group: Mapping[str, Any]) -> str:
    load = f"{group['workers']} workers, {group['load_requests']:.1f} requests"
    advice = group["advice"]
    if advice is None:
        return f"{load}; no advice: {group['why']}."
    if advice["action"] == "add":
        return f"{load}; add {advice['workers']} ({advice['rule']})."
    if advice["action"] == "remove":
        return f"{load}; remove {', '.join(advice['remove'])} ({advice['rule']})."
    withheld = f"; no worker is removed: {group['removal_withheld']}" if "removal_withheld" in group else ""
    return f"{load}; keep them ({advice['rule']}){withheld}."


def _table(group: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("drain order", "load", "cached tokens", "lost hit tokens", "lost GPU s", "absorbed by"):
        table.add_column(name, justify="left" if name in ("drain order", "absorbed by") else "right")
    for worker in group["drain_order"]:
        table.add_row(
            worker["worker"],
            f"{worker['load_requests']:.1f}",
            *(_number(worker.get(key)) for key in ("cached_tokens", "lost_hit_tokens", "lost_gpu_seconds")),
            ", ".join(f"{one['prefix']} → {one['worker']}" for one in worker.get("absorbed_by", ())[:3]) or _UNKNOWN,
        )
    return table


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"
