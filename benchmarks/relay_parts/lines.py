"""What a benchmark prints, and what it measures with: lines, medians, CPU time."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

NUM_CORES_SHARE = 0.5
"""Emulated links mean something only while the host has time left: at most this share of all cores."""


@dataclass(frozen=True)
class Line:
    """One quantity. `value` None: it could not be measured, `reference` says why."""

    metric: str
    value: float | None
    unit: str
    target: str
    ok: bool
    reference: str = ""

    def __str__(self) -> str:
        value = None if self.value is None else round(self.value, 4)
        return json.dumps(
            dict(bench="relay", metric=self.metric, value=value, unit=self.unit, target=self.target,
                 reference=self.reference, ok=self.ok)
        )  # fmt: skip


def at_most(metric: str, value: float, unit: str, limit: float, reference: str = "") -> Line:
    return Line(metric, value, unit, f"<= {limit:g}", value <= limit, reference)


def at_least(metric: str, value: float, unit: str, limit: float, reference: str = "") -> Line:
    return Line(metric, value, unit, f">= {limit:g}", value >= limit, reference)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def listed(values: Sequence[float], digits: int = 3) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


class Stopwatch:
    def __init__(self) -> None:
        self._began_s = time.monotonic()

    @property
    def s(self) -> float:
        return time.monotonic() - self._began_s
