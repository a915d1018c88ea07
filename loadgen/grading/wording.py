"""Figures as people read them; the same in the console, in Markdown and in the report."""

from __future__ import annotations

from prefixwatch.loadgen.grading.comparison import Comparison
from prefixwatch.loadgen.grading.figures import DEFINITIONS, unit_text
from prefixwatch.loadgen.grading.model import WithFigures
from prefixwatch.loadgen.request_log.event_effects import EventEffect

MINUS = "−"
UNKNOWN = "–"


def number(value: float | None, digits: int = 3) -> str:
    """A few significant digits and thousands separators; a dash for unknown."""
    if value is None:
        return UNKNOWN
    decimals = 0
    while decimals < 4 and value and abs(value) * 10**decimals < 10 ** (digits - 1):
        decimals += 1
    text = f"{value:,.{decimals}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text.replace("-", MINUS)


def signed(value: float | None) -> str:
    text = number(value)
    return f"+{text}" if value is not None and value > 0 and text != "0" else text


def percent(value: float | None) -> str:
    """Rounded, but never up to a whole 100 % that wasn't reached."""
    if value is None:
        return UNKNOWN
    text = number(value * 100)
    return f"{number(value * 100, 6) if text == '100' and value < 1 else text} %"


def signed_percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{signed(value * 100)} %"


def interval(limits: tuple[float, float] | None) -> str:
    return UNKNOWN if limits is None else f"{signed(limits[0])}…{signed(limits[1])}"


def limits(found: tuple[float, float] | None) -> str:
    """An interval of a figure that has no sign; nothing where there is none."""
    return "" if found is None else "…".join(number(limit) for limit in found)


def percent_interval(limits: tuple[float, float] | None) -> str:
    return UNKNOWN if limits is None else f"{number(limits[0] * 100)}…{number(limits[1] * 100)} %"


def value_text(value: float | None, unit: str) -> str:
    """A figure's value as a table cell, without its unit except for ratios, which are written as percentages."""
    if unit == "ratio":
        return percent(value)
    return f"{value:,}" if isinstance(value, int) else number(value)


def figure_text(own: WithFigures, name: str) -> str:
    """The value of one of these figures as a table cell; a dash where it is unknown."""
    found = own.figure(name)
    return UNKNOWN if found is None else value_text(found.value, found.unit)


def limits_text(own: WithFigures, name: str) -> str:
    """Its interval as a table cell; empty where there is none."""
    found = own.figure(name)
    if found is None or found.ci95 is None:
        return ""
    return percent_interval(found.ci95) if found.unit == "ratio" else limits(found.ci95)


def difference_text(value: float | None, unit: str) -> str:
    """A difference with its sign; of ratios in percentage points."""
    if unit != "ratio" or value is None:
        return signed(value)
    return f"{signed(100 * value)} points"


def difference_limits(found: tuple[float, float] | None, unit: str) -> str:
    """Its interval, in the same unit."""
    if found is None or unit != "ratio":
        return interval(found)
    return f"{interval((100 * found[0], 100 * found[1]))} points"


def change(comparison: Comparison, *, verdict: bool = True) -> str:
    """One metric's change as a clause: `TTFT p95 412 → 187 ms (−54.6 %, −225 ms, 95 % CI −260…−190)`.

    `verdict=False` leaves out "no significant difference", for a sentence that has said so already.
    """
    figure = DEFINITIONS[comparison.metric]
    unit = "" if figure.unit == "ratio" else f" {unit_text(figure.unit)}"
    before, after = (value_text(value, figure.unit) for value in (comparison.b_value, comparison.a_value))
    moved = f"{figure.title} {before} → {after}{unit}"
    if comparison.ci95 is None:
        return f"{moved} (too few requests for an interval)"
    relative = "" if comparison.relative is None else f"{signed_percent(comparison.relative)}, "
    none = "no significant difference: " if verdict and not comparison.significant else ""
    difference = f"{difference_text(comparison.difference, figure.unit)}{unit}"
    return f"{moved} ({none}{relative}{difference}, 95 % CI {difference_limits(comparison.ci95, figure.unit)})"


def effect(comparison: Comparison) -> str:
    """`better`, `worse` or `not significant`."""
    if not comparison.significant or comparison.difference is None:
        return "not significant"
    higher_is_better = DEFINITIONS[comparison.metric].better == "higher"
    return "better" if (comparison.difference > 0) == higher_is_better else "worse"


def recovery_words(own: EventEffect) -> str:
    """When the reuse was back."""
    if own.hit_ratio_lowest is None:
        return "too few requests to judge"
    if own.seconds_to_recover is None:
        return "not back at 95 % before the next event or the end"
    return f"back at 95 % after {own.seconds_to_recover:.1f} s" if own.seconds_to_recover else "never below 95 %"
