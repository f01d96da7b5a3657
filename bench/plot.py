"""A plot of times per step as SVG text: one line a workload, a mark for each kind of time, a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

ROW_HEIGHT, TOP, LEFT, PLOT_WIDTH, RIGHT, BOTTOM = 26, 64, 110, 640, 30, 44
RADIUS = 5.5


@dataclass(frozen=True)
class Mark:
    """How one kind of time is drawn."""

    name: str
    fill: str
    stroke: str


def draw(title: str, marks: Sequence[Mark], lines: Mapping[str, Sequence[float | None]]) -> str:
    """The plot.

    Parameters
    ----------
    title : str
    marks : sequence of Mark
    lines : mapping of str to sequence of float or None
        Of each workload a time in microseconds for each mark.
    """
    times = [time for line in lines.values() for time in line if time is not None]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    width, height = LEFT + PLOT_WIDTH + RIGHT, TOP + ROW_HEIGHT * len(lines) + BOTTOM

    def x_of(time_us: float) -> float:
        return round(LEFT + PLOT_WIDTH * (math.log10(time_us) - low) / max(high - low, 1), 1)

    elements = [
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-weight="bold">{title}</text>',
        *_legend(marks),
        *_axis(low, high, x_of(10.0**low), PLOT_WIDTH / max(high - low, 1), height - BOTTOM),
    ]
    for place, (name, line) in enumerate(lines.items()):
        elements += _line(name, line, marks, [None if t is None else x_of(t) for t in line], TOP + ROW_HEIGHT * place)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13" fill="#222">'
    )
    return "\n".join([head, *elements, "</svg>"]) + "\n"


def _legend(marks: Sequence[Mark]) -> Iterator[str]:
    x = float(LEFT)
    for mark in marks:
        yield _circle(x + RADIUS, 42, mark)
        yield f'<text x="{x + 17}" y="46">{mark.name}</text>'
        x += 34 + 7.2 * len(mark.name)


def _axis(low: int, high: int, left: float, decade: float, bottom: float) -> Iterator[str]:
    for power in range(low, high + 1):
        x = round(left + decade * (power - low), 1)
        yield f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{bottom}" stroke="#ddd"/>'
        yield f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{10.0**power:g}</text>'
    middle = left + decade * (high - low) / 2
    yield f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle">µs per step</text>'


def _line(
    name: str, line: Sequence[float | None], marks: Sequence[Mark], places: Sequence[float | None], top: float
) -> Iterator[str]:
    y = top + ROW_HEIGHT / 2
    known = [x for x in places if x is not None]
    yield f'<text x="{LEFT - 10}" y="{y + 4.5}" text-anchor="end">{name}</text>'
    yield f'<line x1="{min(known)}" y1="{y}" x2="{max(known)}" y2="{y}" stroke="#bbb"/>'
    for time_us, mark, x in zip(line, marks, places, strict=True):
        if x is not None:
            yield _circle(x, y, mark, f"{name}, {mark.name}: {time_us:.3g} µs")


def _circle(x: float, y: float, mark: Mark, title: str = "") -> str:
    hover = f"<title>{title}</title>" if title else ""
    return f'<circle cx="{x}" cy="{y}" r="{RADIUS}" fill="{mark.fill}" stroke="{mark.stroke}">{hover}</circle>'
