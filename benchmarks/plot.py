"""Curves as a small SVG: panels side by side, one line a subject, each axis linear from 0 or logarithmic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 400, 250
_LEFT, _TOP, _RIGHT, _BOTTOM = 60, 32, 20, 38
_LEGEND_WIDTH = 190
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")
"""Okabe and Ito's: the colour-blind can tell them apart."""


@dataclass(frozen=True)
class Curve:
    """One subject's points (x, y) in order."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """What is drawn over what. On a logarithmic axis all values must be above 0; `span` of x is shaded."""

    title: str
    x_name: str
    curves: Sequence[Curve]
    log_x: bool = False
    log_y: bool = False
    span: tuple[float, float] | None = None
    dots: bool = False
    """Each point is marked, for curves of a few measurements."""


def svg(panels: Sequence[Panel]) -> str:
    """The panels side by side; a subject has one colour in all of them."""
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    colours = {name: _COLOURS[position % len(_COLOURS)] for position, name in enumerate(names)}
    drawn = "".join(
        f'<g transform="translate({position * _WIDTH} 0)">{_drawn(panel, colours)}</g>'
        for position, panel in enumerate(panels)
    )
    legend = "".join(
        f'<g transform="translate({_LEFT + _LEGEND_WIDTH * position} {_HEIGHT + 8})">'
        f'<rect width="12" height="4" fill="{colours[name]}"/><text x="17" y="6">{escape(name)}</text></g>'
        for position, name in enumerate(names)
    )
    titles = escape(", ".join(panel.title for panel in panels))
    width = max(_WIDTH * len(panels), _LEFT + _LEGEND_WIDTH * len(names))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT + 24}" '
        f'font-family="sans-serif" font-size="11" role="img" aria-label="{titles}">'
        f'<rect width="100%" height="100%" fill="white"/>{drawn}{legend}</svg>\n'
    )


def _drawn(panel: Panel, colours: Mapping[str, str]) -> str:
    xs = sorted({x for curve in panel.curves for x, _ in curve.points})
    ys = [y for curve in panel.curves for _, y in curve.points]
    y_ticks = _log_ticks(min(ys), max(ys)) if panel.log_y else _ticks(max(ys))
    x_ticks = xs if panel.log_x else [x for x in _ticks(xs[-1]) if xs[0] <= x <= xs[-1]]
    x_at = _place((xs[0], xs[-1]), (_LEFT, _WIDTH - _RIGHT), panel.log_x)
    y_at = _place((y_ticks[0], y_ticks[-1]), (_HEIGHT - _BOTTOM, _TOP), panel.log_y)
    parts = [f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(panel.title)}</text>']
    if panel.span is not None:
        begin, end = map(x_at, panel.span)
        parts.append(
            f'<rect x="{begin:.1f}" y="{_TOP}" width="{end - begin:.1f}" height="{_HEIGHT - _TOP - _BOTTOM}" '
            'fill="#f0e442" opacity="0.3"/>'
        )
    parts += [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y_at(tick):.1f}" y2="{y_at(tick):.1f}" stroke="#ddd"/>'
        f'<text x="{_LEFT - 5}" y="{y_at(tick) + 4:.1f}" text-anchor="end">{tick:,g}</text>'
        for tick in y_ticks
    ]
    parts += [f'<text x="{x_at(x):.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{x:,g}</text>' for x in x_ticks]
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 7}" text-anchor="middle">{escape(panel.x_name)}</text>')
    for curve in panel.curves:
        places = [(f"{x_at(x):.1f}", f"{y_at(y):.1f}") for x, y in curve.points]
        line, colour = " ".join(map(",".join, places)), colours[curve.name]
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts.extend(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in places if panel.dots)
    return "".join(parts)


def _place(values: tuple[float, float], pixels: tuple[float, float], log: bool) -> Callable[[float], float]:
    """The map from an axis' values to its pixels; an axis of one value has it in the middle."""
    scale: Callable[[float], float] = math.log if log else float
    low, high = map(scale, values)
    begin, end = pixels

    def at(value: float) -> float:
        return begin + (end - begin) * ((scale(value) - low) / (high - low) if high > low else 0.5)

    return at


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def _ticks(high: float) -> list[float]:
    step = 10.0 ** math.floor(math.log10(high or 1.0))
    step = next(size for size in (step / 5, step / 2, step, 2 * step) if high / size <= 6)
    return [step * k for k in range(math.ceil(high / step) + 1)]
