"""The caches of `prefixwatch simulate --cache`: which ones, and the figures of runs under each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prefixwatch.loadgen.request_log.cache_moves import CacheFigures, LoggedRun, cache_figures
from prefixwatch.loadgen.scenario.cache_section import ARCHITECTURES, Cache
from prefixwatch.loadgen.scenario.fleet_section import EventPlan
from prefixwatch.router.policies.spec import parse_spec, split
from prefixwatch.simulator.result import SimulationResult
from prefixwatch.stack.errors import UsageError

CACHE_HELP = (
    "Where KV is beyond each GPU, comma-separated, each with keys of the scenario's section `cache` if wanted: "
    "'sticky,shared{link_gbit_per_second=3,compression=3.5}'. `sticky`: nowhere. `shared`: in one store. "
    "`transfer`: on the other workers. `tiers`: CPU, disk, remote. With several, each policy runs under each. "
    "Default: the scenario's."
)


def chosen_caches(given: str, scenario: Cache | None = None) -> dict[str, Cache]:
    """The caches that the option names, by what results call them; the scenario's own where it names none, and empty
    where neither says anything.

    What an option's braces leave out is as in the scenario. Raises UsageError.
    """
    if not given:
        return {} if scenario is None else {scenario.architecture: scenario}
    found: dict[str, Cache] = {}
    for part in split(given):
        try:
            spec = parse_spec(part)
        except ValueError as error:
            raise UsageError(f"--cache: {error}") from error
        if spec.name not in ARCHITECTURES:
            raise UsageError(f"--cache {spec.name}: choose of {', '.join(ARCHITECTURES)}")
        if spec.label in found:
            raise UsageError(f"--cache names '{spec.label}' twice")
        if "architecture" in spec.options:
            raise UsageError(f"--cache '{part}': the name is the architecture: take it out of the braces")
        unknown = [key for key in spec.options if key not in Cache.model_fields]
        if unknown:
            keys = ", ".join(key for key in Cache.model_fields if key != "architecture")
            raise UsageError(f"--cache '{part}': '{unknown[0]}' is not a key of it; it has {keys}")
        try:
            found[spec.label] = (scenario or Cache()).at({**spec.options, "architecture": spec.name})
        except ValueError as error:
            raise UsageError(f"--cache '{part}': {_first_problem(error)}") from error
    if not found:
        raise UsageError("--cache names none: give one or more, separated by commas")
    return found


def run_label(policy: str, cache: str, caches: Mapping[str, Cache]) -> str:
    """What results call a policy under one of these caches: its own name where there is no choice."""
    return policy if len(caches) < 2 else f"{policy}@{cache}"


def figures_of_results(results: Iterable[SimulationResult], events: EventPlan | None) -> list[CacheFigures]:
    """The figures of what moved, by policy."""
    runs: dict[str, list[LoggedRun]] = {}
    for result in results:
        runs.setdefault(result.policy, []).append(LoggedRun(result.records, result.cache_log))
    return cache_figures(runs, events)


def _first_problem(error: ValueError) -> str:
    errors: Sequence[Mapping[str, object]] = getattr(error, "errors", list)()
    if not errors:
        return str(error)
    first = errors[0]
    where = first.get("loc")
    return f"{'.'.join(map(str, where)) if isinstance(where, tuple) else ''}: {first.get('msg')}"
