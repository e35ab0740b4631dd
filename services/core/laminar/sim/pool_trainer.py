"""A trainer in virtual time: begin, publish, then take, train, commit and publish again, attempt after attempt."""

from __future__ import annotations

from collections.abc import Callable

from laminar.sim.pool_replica import Caller
from laminar.sim.pool_service import Begun, Delivered, PoolService, Refusal
from laminar.sim.timeline import Timeline

TRAIN_S = 0.5
WAIT_S = 0.2
CHECKPOINT_EVERY = 2
JudgeBatch = Callable[[Delivered], None]


class Trainer:
    """`acknowledged_step`: the last step that the pool has told this attempt is committed; -1: it has not begun."""

    def __init__(self, timeline: Timeline, caller: Caller, steps: int, judge: JudgeBatch) -> None:
        self._timeline, self._caller, self._steps, self._judge = timeline, caller, steps, judge
        self._attempt = 0
        self._parent: int | None = None
        self.acknowledged_step = -1

    def start(self) -> None:
        """The next attempt; an earlier one ends at once."""
        self._attempt += 1
        self.acknowledged_step = -1
        self._begin(self._attempt)

    def _alive(self, attempt: int) -> Callable[[], bool]:
        return lambda: self._attempt == attempt

    def _begin(self, attempt: int) -> None:
        def begun(answer: object) -> None:
            if answer is Refusal.BUSY:
                self._begin(attempt)
                return
            assert isinstance(answer, Begun), answer
            self.acknowledged_step, self._parent = answer.step, answer.version
            self._publish(attempt)

        self._caller.call(lambda pool: pool.begin(attempt), begun, self._alive(attempt))

    def _publish(self, attempt: int) -> None:
        step, parent = self.acknowledged_step, self._parent

        def published(answer: object) -> None:
            assert isinstance(answer, int), answer
            self._parent = answer
            if step < self._steps:
                self._take(attempt)

        self._caller.call(lambda pool: pool.publish(attempt, step, parent), published, self._alive(attempt))

    def _take(self, attempt: int) -> None:
        step, alive = self.acknowledged_step + 1, self._alive(attempt)

        def taken(answer: object) -> None:
            if answer is None:
                self._timeline.after(WAIT_S, lambda: alive() and self._take(attempt))
                return
            assert isinstance(answer, Delivered), answer
            self._judge(answer)
            self._timeline.after(TRAIN_S, lambda: alive() and self._commit(attempt))

        self._caller.call(lambda pool: pool.take(attempt, step), taken, alive)

    def _commit(self, attempt: int) -> None:
        step = self.acknowledged_step + 1
        saved = step % CHECKPOINT_EVERY == 0 or step == self._steps

        def committed(answer: object) -> None:
            assert answer is None, answer
            self.acknowledged_step = step
            self._publish(attempt)

        def ask(pool: PoolService) -> object:
            return pool.end_step(attempt, step, checkpoint=saved)

        self._caller.call(ask, committed, self._alive(attempt))
