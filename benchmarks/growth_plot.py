"""Growth curves as a small SVG: one panel a quantity, both axes logarithmic, one line a subject."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 360, 260
_LEFT, _TOP, _RIGHT, _BOTTOM = 62, 34, 24, 40
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")
"""Okabe and Ito's, told apart by the colour-blind."""


@dataclass(frozen=True)
class Line:
    """One subject's points (x, y), all above 0."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """What is drawn, over what."""

    title: str
    x_name: str
    lines: Sequence[Line]


def growth_svg(panels: Sequence[Panel]) -> str:
    """The panels side by side; a subject has one colour in all of them."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    colours = {name: _COLOURS[position % len(_COLOURS)] for position, name in enumerate(names)}
    drawn = "".join(
        f'<g transform="translate({position * _WIDTH} 0)">{_drawn(panel, colours)}</g>'
        for position, panel in enumerate(panels)
    )
    legend = "".join(
        f'<g transform="translate({_LEFT + 130 * position} {_HEIGHT + 8})">'
        f'<rect width="12" height="4" fill="{colours[name]}"/>'
        f'<text x="17" y="6">{escape(name)}</text></g>'
        for position, name in enumerate(names)
    )
    titles = escape(", ".join(panel.title for panel in panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH * len(panels)} {_HEIGHT + 24}" '
        f'font-family="sans-serif" font-size="11" role="img" aria-label="{titles}">'
        f'<rect width="100%" height="100%" fill="white"/>{drawn}{legend}</svg>\n'
    )


def _drawn(panel: Panel, colours: Mapping[str, str]) -> str:
    title, x_name, lines = panel.title, panel.x_name, panel.lines
    xs = sorted({x for line in lines for x, _ in line.points})
    ys = [y for line in lines for _, y in line.points]
    low, high = 10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys)))

    def across(x: float) -> float:
        share = math.log(x / xs[0]) / math.log(xs[-1] / xs[0]) if xs[-1] > xs[0] else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def up(y: float) -> float:
        share = math.log(y / low) / math.log(high / low) if high > low else 0.5
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text x="{_LEFT}" y="20" font-weight="bold">{escape(title)}</text>']
    decade = low
    while decade <= high * 1.001:
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up(decade):.1f}" y2="{up(decade):.1f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{up(decade) + 4:.1f}" text-anchor="end">{decade:,g}</text>'
        )
        decade *= 10
    parts.extend(
        f'<text x="{across(x):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{x:,g}</text>' for x in xs
    )
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>')
    for line in lines:
        colour = colours[line.name]
        points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.extend(f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.5" fill="{colour}"/>' for x, y in line.points)
    return "".join(parts)
