"""Charts as SVG text: lines, histograms, areas over time. Colours are CSS variables of the page (`--c1`...).

An element with `data-tip` shows that text when pointed at (report.js).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 1080.0
"""Units of a full-width chart; the page scales it."""
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 12.0, 34.0


@dataclass(frozen=True, slots=True)
class Series:
    """`color`: number of the page's colour. `dots`: single measurements behind a `line` through their mean."""

    label: str
    points: Sequence[tuple[float, float]]
    color: int
    dots: bool = False
    fill: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """The drawing area and its scales."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: float = WIDTH
    height: float = 290.0

    def px(self, x: float) -> float:
        span = self.x[1] - self.x[0] or 1.0
        return LEFT + (x - self.x[0]) / span * (self.width - LEFT - RIGHT)

    def py(self, y: float) -> float:
        span = self.y[1] - self.y[0] or 1.0
        return self.height - BOTTOM - (y - self.y[0]) / span * (self.height - TOP - BOTTOM)


def ticks(low: float, high: float, about: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) inside the range; `whole`: integers only."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    rough = span / max(1, about)
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    step = max(1.0, step) if whole else step
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 10) for index in range(first, last + 1)]


def line_chart(series: Sequence[Series], frame: Frame, *, title: str, x_label: str, tips: Sequence[str] = ()) -> str:
    """Lines over training steps. `tips`: one text a point of the first series, shown when its column is pointed at."""
    parts = [_open(frame, title), _axes(frame, x_label)]
    for item in series:
        parts.append(_dots(item, frame) if item.dots else _path(item, frame))
    if tips and series:
        parts.append(_columns([x for x, _ in series[0].points], tips, frame))
    return "".join([*parts, "</svg>"])


def histogram_chart(
    groups: Sequence[tuple[str, Mapping[int, int], int]], *, title: str, x_label: str, most: int = 24,
    width: float = 520.0, height: float = 210.0,
) -> str:  # fmt: skip
    """Shares of each value, the groups (label, counts, colour) side by side. Wide ranges are put into at most `most`
    equal bins."""
    highest = max((max(counts, default=0) for _, counts, _ in groups), default=0)
    lowest = min((min(counts, default=0) for _, counts, _ in groups), default=0)
    size = max(1, math.ceil((highest - lowest + 1) / most))
    num_bins = (highest - lowest) // size + 1
    shares = [(label, _binned(counts, lowest, size, num_bins), color) for label, counts, color in groups]
    top = max((max(bins) for _, bins, _ in shares), default=0.0) or 1.0
    frame = Frame((0, num_bins), (0, top * 1.08), width, height)
    parts = [_open(frame, title), _y_grid(frame, percent=True)]
    each = (frame.px(1) - frame.px(0)) * 0.84 / max(1, len(shares))
    for place, (label, bins, color) in enumerate(shares):
        for index, share in enumerate(bins):
            low = lowest + index * size
            name = f"{low}" if size == 1 else f"{low} to {low + size - 1}"
            x = frame.px(index) + (frame.px(1) - frame.px(0)) * 0.08 + place * each
            tip = escape(f"{label}: {x_label} {name}, {share:.1%}")
            parts.append(
                f'<rect class="bar k{color}" x="{x:.1f}" y="{frame.py(share):.1f}" width="{max(0.6, each - 0.6):.1f}" '
                f'height="{frame.py(0) - frame.py(share):.1f}" rx="1.5" data-tip="{tip}"/>'
            )
    every = max(1, math.ceil(num_bins / 12))
    for index in range(0, num_bins, every):
        parts.append(_text(frame.px(index + 0.5), frame.height - BOTTOM + 14, str(lowest + index * size), "middle"))
    parts.append(_text((LEFT + width - RIGHT) / 2, height - 4, x_label, "middle", "axis"))
    return "".join([*parts, "</svg>"])


def area_strip(
    label: str, points: Sequence[tuple[float, float]], frame: Frame, *, color: int, tips: Sequence[str]
) -> str:
    """A share (0..1) over time, as a staircase: each value holds until the next."""
    parts = [_open(frame, label), _y_grid(frame, percent=True, about=2), _x_ticks(frame)]
    if points:
        stairs = [f"M{frame.px(points[0][0]):.1f} {frame.py(0):.1f}"]
        for place, (start, value) in enumerate(points):
            end = points[place + 1][0] if place + 1 < len(points) else start
            stairs.append(f"L{frame.px(start):.1f} {frame.py(value):.1f}L{frame.px(end):.1f} {frame.py(value):.1f}")
        stairs.append(f"L{frame.px(points[-1][0]):.1f} {frame.py(0):.1f}Z")
        parts.append(f'<path class="area k{color}" d="{"".join(stairs)}"/>')
        parts.append(_columns([start for start, _ in points], tips, frame))
    return "".join([*parts, "</svg>"])


def legend(entries: Sequence[tuple[str, int]]) -> str:
    """One line of colour keys."""
    keys = "".join(f'<span class="key"><i class="k{color}"></i>{escape(label)}</span>' for label, color in entries)
    return f'<div class="legend">{keys}</div>'


def padded(values: Sequence[float], *, low: float | None = None, high: float | None = None) -> tuple[float, float]:
    """A range around the values with some air; fixed ends stay where they are."""
    if not values:
        return (low or 0.0, high or 1.0)
    least, most = min(values), max(values)
    air = (most - least) * 0.08 or abs(most) * 0.1 or 0.05
    bottom = max(0.0, least - air) if least >= 0 else least - air
    return (low if low is not None else bottom, high if high is not None else most + air)


def _open(frame: Frame, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {frame.width:g} {frame.height:g}" role="img" aria-label="{escape(title)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    )


def _axes(frame: Frame, x_label: str) -> str:
    middle = (LEFT + frame.width - RIGHT) / 2
    return _y_grid(frame) + _x_ticks(frame, whole=True) + _text(middle, frame.height - 4, x_label, "middle", "axis")


def _y_grid(frame: Frame, *, percent: bool = False, about: int = 5) -> str:
    parts: list[str] = []
    for value in ticks(*frame.y, about):
        y = frame.py(value)
        name = f"{value * 100:g} %" if percent else f"{value:g}"
        parts.append(f'<line class="grid" x1="{LEFT:g}" x2="{frame.width - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 6, y + 3.5, name, "end"))
    return "".join(parts)


def _x_ticks(frame: Frame, *, whole: bool = False) -> str:
    places = ticks(*frame.x, 8, whole=whole)
    return "".join(_text(frame.px(value), frame.height - BOTTOM + 15, f"{value:g}", "middle") for value in places)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _path(item: Series, frame: Frame) -> str:
    if not item.points:
        return ""
    line = "L".join(f"{frame.px(x):.1f} {frame.py(y):.1f}" for x, y in item.points)
    area = ""
    if item.fill:
        floor = frame.py(frame.y[0])
        first, last = frame.px(item.points[0][0]), frame.px(item.points[-1][0])
        area = f'<path class="shade k{item.color}" d="M{first:.1f} {floor:.1f}L{line}L{last:.1f} {floor:.1f}Z"/>'
    return f'{area}<path class="line k{item.color}" d="M{line}"/>'


def _dots(item: Series, frame: Frame) -> str:
    return "".join(
        f'<circle class="dot k{item.color}" cx="{frame.px(x):.1f}" cy="{frame.py(y):.1f}" r="2.4"/>'
        for x, y in item.points
    )


def _columns(xs: Sequence[float], tips: Sequence[str], frame: Frame) -> str:
    """Invisible columns that carry the tips; each reaches half way to its neighbours."""
    parts: list[str] = []
    for index, (x, tip) in enumerate(zip(xs, tips, strict=True)):
        left = frame.px((xs[index - 1] + x) / 2 if index else x) - (0 if index else 4)
        right = frame.px((xs[index + 1] + x) / 2) if index + 1 < len(xs) else frame.px(x) + 4
        parts.append(
            f'<rect class="hit" x="{left:.1f}" y="{TOP:g}" width="{max(0.5, right - left):.1f}" '
            f'height="{frame.height - TOP - BOTTOM:g}" data-tip="{escape(tip)}"/>'
        )
    return "".join(parts)


def _binned(counts: Mapping[int, int], lowest: int, size: int, num_bins: int) -> list[float]:
    total = sum(counts.values()) or 1
    bins = [0] * num_bins
    for value, number in counts.items():
        bins[(value - lowest) // size] += number
    return [number / total for number in bins]
