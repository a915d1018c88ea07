"""Figures as people read them; the same in the console, in Markdown and in the report."""

from __future__ import annotations

from loadgen.comparison import METRIC_BY_NAME, Comparison

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


def percent(value: float | None, digits: int = 3) -> str:
    """Rounded, but never up to a whole 100 % that wasn't reached."""
    if value is None:
        return UNKNOWN
    text = number(value * 100, digits)
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


def change(comparison: Comparison, *, verdict: bool = True) -> str:
    """One metric's change as a clause: `TTFT p95 412 → 187 ms (−54.6 %, −225 ms, 95 % CI −260…−190)`.

    `verdict=False` leaves out "no significant difference", for a sentence that has said so already.
    """
    metric = METRIC_BY_NAME[comparison.metric]
    unit = f" {metric.unit}" if metric.unit else ""
    moved = f"{metric.title} {number(comparison.b_value)} → {number(comparison.a_value)}{unit}"
    if comparison.ci95 is None:
        return f"{moved} (too few requests for an interval)"
    relative = "" if comparison.relative is None else f"{signed_percent(comparison.relative)}, "
    none = "no significant difference: " if verdict and not comparison.significant else ""
    return f"{moved} ({none}{relative}{signed(comparison.difference)}{unit}, 95 % CI {interval(comparison.ci95)})"


def effect(comparison: Comparison) -> str:
    """`better`, `worse` or `not significant`."""
    if not comparison.significant or comparison.difference is None:
        return "not significant"
    higher_is_better = METRIC_BY_NAME[comparison.metric].better == "higher"
    return "better" if (comparison.difference > 0) == higher_is_better else "worse"
