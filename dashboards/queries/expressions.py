"""PromQL as definitions write it → as Grafana sends it: macros in full, every selector filtered by the variables.

Macros: `$ratio(a, b)` is a division that has no value, rather than NaN, where b is 0; `$share(a, b)` is one by the
single value b. `$quantile(q, family, label, …)` is a quantile by these labels, of classic and of native histograms,
absent without observations; `$observed(family, label, …)` is how many a second they observe. `$both(a, b)` is the lower
of the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain

import promql_parser as ast

from prefixwatch.alerts.build import PROMETHEUS_OWN, build, known_metrics
from prefixwatch.alerts.rule import RecordingRule
from prefixwatch.documents import DocumentError
from prefixwatch.slo.promql import metric_names, walk

RATE_INTERVAL = "$__rate_interval"
EVERYTHING = ".*"
"""What a variable stands for when all of it is chosen; it also matches series without the label."""

BY_LABEL = {"model": "model", "target": "worker", "tenant": "tenant"}
"""Label → the variable that filters it."""
_COLLECTED = ("cluster", "job")
"""Labels that the scraping Prometheus adds to what it scrapes."""


@cache
def recorded() -> dict[str, tuple[str, ...]]:
    """Every recording rule's series, with the labels that its rule keeps or adds."""
    found: dict[str, set[str]] = {}
    for rule in recording_rules():
        kept = set(chain.from_iterable(_kept(ast.parse(rule.expr))))
        found.setdefault(rule.name, set()).update(rule.labels, kept - {"le"})
    return {name: tuple(sorted(labels)) for name, labels in found.items()}


@cache
def recording_rules() -> tuple[RecordingRule, ...]:
    """All that `prefixwatch slo build` writes for the shipped documents."""
    rules = [rule for file in build() for group in file.groups for rule in group.rules]
    return tuple(rule for rule in rules if isinstance(rule, RecordingRule))


def _kept(root: object) -> Iterator[Sequence[str]]:
    """Labels that aggregations with a `by` keep, of those that are in no other aggregation."""
    for node, above in walk(root):
        outermost = not any(isinstance(up, ast.AggregateExpr) for up in above)
        if isinstance(node, ast.AggregateExpr) and node.modifier is not None and outermost:
            yield node.modifier.labels


@cache
def series_labels() -> dict[str, tuple[str, ...]]:
    """Every series that a panel may read: the exporter's, the rules' and Prometheus' own."""
    exported = {name: tuple(labels) for name, labels in known_metrics().items()}
    return {**exported, **recorded(), **PROMETHEUS_OWN}


def finished(expr: str, variables: Sequence[str], place: str) -> str:
    """The whole expression with the filters of these variables. Raises DocumentError."""
    try:
        return scoped(expanded(expr), variables)
    except ValueError as error:
        raise DocumentError(f"{place}: {error}") from error


def expanded(expr: str) -> str:
    """Macros in full, innermost last. Raises ValueError."""
    for name, macro in _MACROS.items():
        while (start := expr.find(f"${name}(")) >= 0:
            arguments, end = _arguments(expr, start + len(name) + 2)
            expr = expr[:start] + macro(*arguments) + expr[end:]
    return " ".join(expr.split())


def _ratio(part: str, whole: str) -> str:
    return f"({part}) / (({whole}) > 0)"


def _share(part: str, whole: str) -> str:
    return f"({part}) / on () group_left () (({whole}) > 0)"


def _quantile(q: str, family: str, *labels: str) -> str:
    """`rate` before `sum`: a restart is a reset of its own series (SL11, SL01, EM45)."""
    name, _, matchers = family.partition("{")
    where = "{" + matchers if matchers else ""
    by, with_le = ", ".join(labels), ", ".join(("le", *labels))
    counted = f"sum by ({by}) (rate({name}_count{where}[{RATE_INTERVAL}])) > 0"
    classic = f"histogram_quantile({q}, sum by ({with_le}) (rate({name}_bucket{where}[{RATE_INTERVAL}])))"
    native = f"histogram_quantile({q}, sum by ({by}) (rate({name}{where}[{RATE_INTERVAL}])))"
    return f"(({classic}) and on ({by}) ({counted})) or {native}"


def _both(one: str, other: str) -> str:
    """The lower of the two; a part of one alone doesn't count."""
    return f"(({one}) <= ({other}) or ({other}) < ({one}))"


def _observed(family: str, *labels: str) -> str:
    """A histogram that is stored in its native form only has no series of counts (SL11)."""
    name, _, matchers = family.partition("{")
    where, by = "{" + matchers if matchers else "", ", ".join(labels)
    native = f"histogram_count(sum by ({by}) (rate({name}{where}[{RATE_INTERVAL}])))"
    return f"(sum by ({by}) (rate({name}_count{where}[{RATE_INTERVAL}])) or {native})"


_MACROS: Mapping[str, Callable[..., str]] = {
    "share": _share,
    "ratio": _ratio,
    "quantile": _quantile,
    "observed": _observed,
    "both": _both,
}


def _arguments(text: str, start: int) -> tuple[list[str], int]:
    """What stands between this opening parenthesis and its closing one, split at the commas of its own level."""
    found: list[str] = []
    depth, begun = 0, start
    for position in range(start, len(text)):
        character = text[position]
        if character in ")]}" and depth == 0:
            return [*found, text[begun:position].strip()], position + 1
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append(text[begun:position].strip())
            begun = position + 1
    raise ValueError(f"a parenthesis isn't closed: {text[start:]}")


_SERIES = re.compile(r"(?<![\w:\"])(?P<name>[a-zA-Z_:][\w:]*)(?P<braces>\{(?P<matchers>[^}]*)\})?(?![\w:(=\"])")


def scoped(expr: str, variables: Sequence[str]) -> str:
    """Every selector with a matcher for each of its labels that a variable stands for."""
    known = series_labels()

    def filtered(match: re.Match[str]) -> str:
        if match["name"] not in known:
            return match[0]
        own = [match["matchers"].strip()] if match["matchers"] and match["matchers"].strip() else []
        given = set(re.findall(r"(\w+)\s*[!=]~?=?", own[0])) if own else set()
        return match["name"] + "{" + ", ".join([*own, *_filters(match["name"], given, variables)]) + "}"

    return _SERIES.sub(filtered, expr)


def _filters(name: str, given: set[str], variables: Sequence[str]) -> list[str]:
    labels = series_labels()[name]
    collected = _COLLECTED if name not in recorded() and name != "ALERTS" else _COLLECTED[:1]
    found = [f'{label}=~"${label}"' for label in collected]
    found += [
        f'{label}=~"${variable}"'
        for label, variable in BY_LABEL.items()
        if label in labels and label not in given and variable in (*variables, "model")
    ]
    return found


def substituted(expr: str, values: Mapping[str, str]) -> str:
    """Variables replaced, as Grafana does before it sends a query; longer names first."""
    for name in sorted(values, key=len, reverse=True):
        expr = expr.replace(f"${name}", values[name])
    return expr


def rate_interval_seconds(step_seconds: float, scrape_seconds: float) -> float:
    """What Grafana puts for `$__rate_interval`: four scrapes, or a step and one scrape."""
    return max(step_seconds + scrape_seconds, 4 * scrape_seconds)


def metrics_of(expr: str) -> list[str]:
    """Names of the series that an expression reads, in order of appearance."""
    return metric_names(substituted(expr, {"__rate_interval": "5m", "__range": "1h"}))
