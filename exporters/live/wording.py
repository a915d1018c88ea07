"""Figures as people read them. None is unknown: a dash."""

from __future__ import annotations

UNKNOWN = "–"
_THOUSAND, _MILLION, _BILLION = 1e3, 1e6, 1e9


def percent(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else f"{ratio * 100:.0f} %"


def share(ratio: float | None) -> str:
    """A percentage with the digits that an objective needs."""
    return UNKNOWN if ratio is None else f"{ratio * 100:.4g} %"


def seconds(value: float | None) -> str:
    """In ms below a second."""
    if value is None:
        return UNKNOWN
    return f"{value:.2f} s" if abs(value) >= 1 else f"{value * 1000:.3g} ms"


def count(value: float | None) -> str:
    """Three digits and a unit of thousands above 10,000."""
    if value is None:
        return UNKNOWN
    for size, unit in ((_BILLION, "G"), (_MILLION, "M"), (10 * _THOUSAND, "k")):
        if abs(value) >= size:
            return f"{value / (_THOUSAND if unit == 'k' else size):.3g} {unit}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.2g}"
