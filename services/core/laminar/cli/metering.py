"""Rates from counters: tokens a second of the fleet, time left of the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from laminar.wire.messages import EngineLoad, StepRow

WINDOW_S = 6.0
"""Long enough to smooth over the one-second rhythm of heartbeats, short enough to show a replica that is gone."""
ETA_STEPS = 20
"""Step times change as responses shorten: the newest steps tell more than the whole run."""


class TokenMeter:
    """Tokens a second over the last WINDOW_S. A replica's counter that falls began a new life and counts from 0."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._seen: deque[tuple[float, int]] = deque(maxlen=256)
        self.total_tokens = 0

    def add(self, loads: Mapping[str, EngineLoad], now_s: float) -> None:
        """One reading of every replica's `generated_tokens`, at monotonic time `now_s`."""
        for slot, load in loads.items():
            grown = load.generated_tokens - self._last.get(slot, 0)
            self.total_tokens += grown if grown >= 0 else load.generated_tokens
            self._last[slot] = load.generated_tokens
        self._seen.append((now_s, self.total_tokens))
        while len(self._seen) > 2 and now_s - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()

    @property
    def tokens_per_s(self) -> float | None:
        """None until two readings lie apart."""
        if len(self._seen) < 2:
            return None
        (start_s, start), (end_s, end) = self._seen[0], self._seen[-1]
        return (end - start) / (end_s - start_s) if end_s > start_s else None


def seconds_per_step(rows: Sequence[StepRow]) -> float | None:
    """Mean time between the newest ETA_STEPS commits of the surviving attempt's steps; None below two."""
    newest = rows[-ETA_STEPS - 1 :]
    if len(newest) < 2:
        return None
    steps = newest[-1].step - newest[0].step
    return max(0.0, (newest[-1].wall_s - newest[0].wall_s) / steps) if steps > 0 else None


def surviving(rows: Sequence[StepRow]) -> list[StepRow]:
    """One row a step, in step order: the last attempt to commit a step wins."""
    newest: dict[int, StepRow] = {}
    for row in rows:
        held = newest.get(row.step)
        if held is None or row.attempt >= held.attempt:
            newest[row.step] = row
    return [newest[step] for step in sorted(newest)]
