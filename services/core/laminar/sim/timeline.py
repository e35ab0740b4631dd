"""Virtual time: actions in the order of their moments; those of one moment as they were asked for."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

Action = Callable[[], object]
"""What it returns is of no interest."""


class Timeline:
    """Time passes only from one action to the next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._due: list[tuple[float, int, Action]] = []
        self._asked = 0

    def after(self, delay_s: float, action: Action) -> None:
        """Calls `action` once, `delay_s` from now."""
        assert delay_s >= 0.0, f"{delay_s} s lie in the past"
        self._asked += 1
        heapq.heappush(self._due, (self.now_s + delay_s, self._asked, action))

    def run(self, until_s: float, done: Callable[[], bool], check: Action) -> bool:
        """One action after the other, `check` after each, until `done`. False: not by `until_s`, or nothing is due."""
        while self._due and not done():
            self.now_s, _, action = heapq.heappop(self._due)
            if self.now_s > until_s:
                return False
            self.num_events += 1
            action()
            check()
        return done()


class Link:
    """A network between processes that connect anew: messages are late, lost, doubled and overtaken."""

    def __init__(self, timeline: Timeline, rng: random.Random, *, loss: float, duplicates: float) -> None:
        self._timeline, self._rng, self._loss, self._duplicates = timeline, rng, loss, duplicates

    def send(self, deliver: Action) -> bool:
        """False if it is lost."""
        chance = self._rng.random()
        if chance < self._loss:
            return False
        for _ in range(2 if chance < self._loss + self._duplicates else 1):
            slow = self._rng.random() < 0.05
            self._timeline.after(self._rng.uniform(0.05, 1.5) if slow else self._rng.uniform(0.001, 0.03), deliver)
        return True
