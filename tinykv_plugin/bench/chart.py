"""line_chart(): a chart as SVG, for a page that brings its own style."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 48
MOST_TICKS = 6

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class _Axis:
    """From data to a place between ``start`` and ``end`` of the picture."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool

    def place(self, value: float) -> float:
        low, high = self._scaled(self.low), self._scaled(self.high)
        share = (self._scaled(value) - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def _scaled(self, value: float) -> float:
        return math.log2(value) if self.logarithmic else value


def line_chart(
    title: str, x_label: str, y_label: str, series: Mapping[str, Points], *, logarithmic: bool = False
) -> str:
    """Lines with a dot at each point; the y axis starts at 0. ``logarithmic``: the x axis, ticks at the points.

    Lines have the classes ``c0``, ``c1`` …, text and axes the class ``axis``. What is drawn is also said in words, in
    ``title`` and ``desc``.
    """
    points = [point for line in series.values() for point in line]
    if not points:
        return f'<p class="none">{escape(title)}: nothing was measured.</p>'
    places = sorted({x for x, _ in points})
    top = max(y for _, y in points) or 1.0
    y_ticks = nice_ticks(top)
    x_ticks = places[:: -(-len(places) // 8)] if logarithmic else nice_ticks(places[-1])
    x_low, x_high = (places[0], places[-1]) if logarithmic else (0.0, x_ticks[-1])
    x_axis = _Axis(x_low, x_high, LEFT, WIDTH - RIGHT, logarithmic)
    y_axis = _Axis(0.0, y_ticks[-1], HEIGHT - BOTTOM, TOP, False)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{escape(title)}</title><desc>{escape(_in_words(series, x_label, y_label))}</desc>",
    ]
    for tick in y_ticks:
        y = y_axis.place(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="axis" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in x_ticks:
        x = x_axis.place(tick)
        parts.append(f'<text class="axis" x="{x:.1f}" y="{HEIGHT - 28}" text-anchor="middle">{number(tick)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    turned = f'transform="rotate(-90 14 {HEIGHT / 2})"'
    label = f'<text class="axis" x="14" y="{HEIGHT / 2}" text-anchor="middle" {turned}>{escape(y_label)}</text>'
    parts.append(label)
    for index, (name, line) in enumerate(series.items()):
        placed = [(x_axis.place(x), y_axis.place(y)) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline class="c{index}" points="{path}"><title>{escape(name)}</title></polyline>')
        if len(placed) <= 40:
            parts += [f'<circle class="c{index}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in placed]
    parts.append("</svg>")
    legend = "".join(f'<li><i class="c{index}"></i>{escape(name)}</li>' for index, name in enumerate(series))
    heading = f"<figcaption>{escape(title)}</figcaption>"
    return f'<figure>{heading}{"".join(parts)}<ul class="legend">{legend}</ul></figure>'


def nice_ticks(top: float) -> list[float]:
    """Round numbers from 0 to at least ``top``, at most :data:`MOST_TICKS` of them."""
    rough = top / (MOST_TICKS - 1)
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10, 20) if power * factor >= rough)
    return [step * index for index in range(math.ceil(top / step - 1e-9) + 1)]


def number(value: float) -> str:
    """For an axis: no more digits than needed."""
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.3g}"


def _in_words(series: Mapping[str, Points], x_label: str, y_label: str) -> str:
    lines = []
    for name, line in series.items():
        if line:
            (first, low), (last, high) = line[0], line[-1]
            lines.append(f"{name}: {low:.3g} {y_label} at {number(first)} {x_label}, {high:.3g} at {number(last)}")
    return "; ".join(lines)
