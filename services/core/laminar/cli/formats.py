"""How numbers read: durations, counts, confidence intervals, sparklines. Pure text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from laminar.wire.messages import EvaluationProgress

_BARS = "▁▂▃▄▅▆▇█"
Z_95 = 1.959964
"""Half-width of a 95 % interval in standard errors: means of hundreds of items are near enough to normal."""


def duration(seconds: float) -> str:
    """`0:07`, `3:05`, `2:15:09`; a dash for what is not known (nan, inf, negative)."""
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def count(number: float) -> str:
    """At most four digits that matter: `950`, `9,500`, `95.0 k`, `1.25 M`."""
    for limit, unit, places in ((1e4, "", 0), (1e6, " k", 1), (1e9, " M", 2)):
        if abs(number) < limit:
            scale = 1.0 if not unit else limit / 1e3
            return f"{number / scale:,.{places}f}{unit}"
    return f"{number / 1e9:,.2f} G"


def interval95(mean: float, stderr: float, *, is_rate: bool = True) -> tuple[float, float]:
    """The 95 % confidence interval of a mean; cut to 0..1 for a rate."""
    low, high = mean - Z_95 * stderr, mean + Z_95 * stderr
    return (max(0.0, low), min(1.0, high)) if is_rate else (low, high)


def with_interval(mean: float, stderr: float) -> str:
    """`0.512 ± 0.043` (95 %)."""
    return f"{mean:.3f} ± {Z_95 * stderr:.3f}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The whole series in at most `width` blocks (each the mean of its share), scaled from its lowest to its
    highest."""
    points = thin(values, width)
    if not points:
        return ""
    low, high = min(points), max(points)
    span = high - low
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1)) if span > 0 else 3] for value in points)


def thin(values: Sequence[float], most: int) -> list[float]:
    """At most `most` values, each the mean of an equal share of the series, in order."""
    finite = [value for value in values if math.isfinite(value)]
    if most <= 0 or not finite:
        return []
    if len(finite) <= most:
        return finite
    edges = [round(index * len(finite) / most) for index in range(most + 1)]
    return [sum(finite[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False) if b > a]


def histogram_bars(counts: Mapping[int, int], most: int = 8) -> str:
    """`0▂ 1█ 2▃ 3+▁`: the share of each value, everything from the last shown value on in one."""
    if not counts:
        return ""
    values = sorted(counts)
    shown = {value: counts[value] for value in values[: most - 1]}
    rest = sum(counts[value] for value in values[most - 1 :])
    highest = max([*shown.values(), rest])
    cells = [f"{value}{_bar(number / highest)}" for value, number in shown.items()]
    if rest:
        cells.append(f"{values[most - 1]}+{_bar(rest / highest)}")
    return " ".join(cells)


def histogram_mean(counts: Mapping[int, int]) -> float:
    """Mean value; 0 without entries."""
    total = sum(counts.values())
    return sum(value * number for value, number in counts.items()) / total if total else 0.0


def merged(histograms: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """The sum of several histograms, by value."""
    total: dict[int, int] = {}
    for histogram in histograms:
        for value, number in histogram.items():
            total[value] = total.get(value, 0) + number
    return dict(sorted(total.items()))


def mean(values: Sequence[float]) -> float | None:
    """None without values."""
    return sum(values) / len(values) if values else None


def _bar(share: float) -> str:
    return _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]


def evaluating(progress: EvaluationProgress) -> str:
    """`evaluating version 0: 120/512`."""
    return f"evaluating version {progress.version}: {count(progress.num_done)}/{count(progress.num_samples)}"
