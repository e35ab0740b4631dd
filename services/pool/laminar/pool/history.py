"""The statistics of committed steps: the newest rows whole, of all of them the sums.

A row of a long run is a few kilobytes, and a run may have a hundred thousand steps: what is old and can never be taken
back is kept in the store only, as numbers here.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Self

from laminar.wire.messages import Histogram, StepRow

TAIL_STEPS = 512
"""Rows in memory below the last step that is final: what a view asks for that has fallen behind a little."""


class StepHistory:
    """Steps 1 to n of the surviving lineage, without a gap. Two numbers a step, and a tail of whole rows.

    Invariant: the tail holds every row that a rollback may still take away.
    """

    def __init__(self) -> None:
        self._tail: dict[int, StepRow] = {}
        self._rewards = array("d")
        self._inherent: Counter[int] = Counter()
        self._consumed: Counter[int] = Counter()
        self.response_tokens = 0
        """Of all steps."""

    @classmethod
    def read(cls, rows: Iterable[StepRow], final_step: int) -> Self:
        """Of rows in order, one at a time; `final_step` as in `add`."""
        history = cls()
        for row in rows:
            history.add(row, final_step)
        return history

    @property
    def last(self) -> StepRow | None:
        return next(reversed(self._tail.values()), None)

    @property
    def inherent(self) -> Histogram:
        return Histogram(counts=dict(sorted((+self._inherent).items())))

    @property
    def consumed(self) -> Histogram:
        return Histogram(counts=dict(sorted((+self._consumed).items())))

    def add(self, row: StepRow, final_step: int) -> None:
        """The next step. Steps up to `final_step` are never taken back any more."""
        assert row.step == len(self._rewards) + 1, f"step {row.step} after {len(self._rewards)}"
        self._tail[row.step] = row
        self._rewards.append(row.reward_mean)
        self._count(row, 1)
        for step in [step for step in self._tail if step <= final_step - TAIL_STEPS]:
            del self._tail[step]

    def forget_after(self, step: int) -> None:
        """A rollback. Raises ValueError for steps that were final."""
        if step < self._num_gone:
            raise ValueError(f"steps up to {self._num_gone} are final: no rollback to step {step}")
        for number in [number for number in self._tail if number > step]:
            self._count(self._tail.pop(number), -1)
        del self._rewards[step:]

    def after(self, step: int, limit: int) -> list[StepRow] | None:
        """At most `limit` rows above `step`, in order; None: they are no longer here but in the store."""
        if max(0, step) < self._num_gone:
            return None
        return [row for number, row in self._tail.items() if number > step][:limit]

    def reward_curve(self, num_points: int) -> list[float]:
        """Mean rewards from the first step on, evenly thinned to at most about `num_points`."""
        return self._rewards[:: 1 + len(self._rewards) // num_points].tolist()

    @property
    def _num_gone(self) -> int:
        return len(self._rewards) - len(self._tail)

    def _count(self, row: StepRow, sign: int) -> None:
        for total, counts in ((self._inherent, row.inherent), (self._consumed, row.consumed)):
            for value, number in counts.items():
                total[value] += sign * number
        self.response_tokens += sign * row.response_tokens
