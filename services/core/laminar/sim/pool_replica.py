"""A rollout replica in virtual time: leases, loads, generates, grades, and tells the pool once a second.

It keeps every token until the pool has acknowledged the end, and sends again from where the pool stands. Its tokens
say which version made them and where they stand, so that a mixture or a gap shows in the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from laminar.core.decisions import Outcome, Refresh, WriteResult
from laminar.core.identity import SampleKey
from laminar.sim.pool_service import Adopt, Append, Cancel, End, Grade, Granted, Leased, PoolService, Refusal, Told
from laminar.sim.timeline import Timeline

TOKEN_BYTES = 4
POSITIONS = 1000
"""Above every length: a token is version * POSITIONS + position."""
STEP_S = 0.25
"""Time of one token here."""
FLUSH_S = 1.0
LOAD_S = 0.3


class Caller(Protocol):
    """Calls the pool until it has answered; duplicates and late answers are its business."""

    def call(
        self, ask: Callable[[PoolService], object], take: Callable[[object], None], alive: Callable[[], bool]
    ) -> None: ...


def token(version: int, position: int) -> bytes:
    return (version * POSITIONS + position).to_bytes(TOKEN_BYTES, "little")


@dataclass(slots=True)
class _Work:
    term: int
    version: int
    tokens: bytearray
    durable: int
    ended: bool
    end_told: bool
    declined: bool = False
    reward: float | None = None
    graded: bool = False

    @property
    def length(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass(slots=True)
class Habits:
    """Of all replicas of a run. `length_of`: where a response ends; `poison`: it kills whoever generates it."""

    length_of: Callable[[SampleKey], int]
    reward_of: Callable[[SampleKey], float | None]
    poison: SampleKey | None
    max_tokens: int


@dataclass(slots=True)
class Replica:
    """One slot, life after life. `die`, `stop`, `drain` are what faults do to it."""

    slot: str
    timeline: Timeline
    rng: random.Random
    caller: Caller
    habits: Habits
    held_versions: Callable[[], frozenset[int]]
    life: int = 0
    up: bool = False
    leaving: bool = False
    stopped_until_s: float = 0.0
    incarnation: int | None = None
    version: int | None = None
    _work: dict[SampleKey, _Work] = field(default_factory=dict[SampleKey, _Work])
    _leasing: bool = False
    _telling: bool = False
    num_reloads: int = 0

    # --- lives --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new life: nothing of the earlier one is known."""
        self.life += 1
        self.up, self.leaving, self.incarnation, self.version = True, False, None, None
        self._work, self._leasing, self._telling = {}, False, False
        life, nonce = self.life, f"{self.slot}/{self.life}"

        def joined(incarnation: object) -> None:
            assert isinstance(incarnation, int)
            self.incarnation = incarnation
            self._every(1.0, self._beat, life)
            self._every(STEP_S, self._generate, life)
            self._every(FLUSH_S, self._tell, life)
            self._every(0.1, self._ask_for_work, life)

        self.caller.call(lambda pool: pool.join(self.slot, nonce), self._awake(joined), lambda: self._is(life))

    def die(self, back_after_s: float) -> None:
        """Killed: a process, or its engine."""
        if self.up:
            self.up = False
            self.timeline.after(back_after_s, self._start_if_down)

    def _start_if_down(self) -> None:
        if not self.up:
            self.start()

    def stop(self, for_s: float) -> None:
        """SIGSTOP: it hears and says nothing, then goes on as if no time had passed."""
        self.stopped_until_s = max(self.stopped_until_s, self.timeline.now_s + for_s)

    def drain(self, back_after_s: float) -> None:
        """SIGTERM: says what it has, says goodbye, is gone."""
        if not self.up or self.incarnation is None or self.leaving:
            return
        self.leaving = True
        life, incarnation = self.life, self.incarnation

        def left(_: object) -> None:
            if self._is(life):
                self.up = False
                self.timeline.after(back_after_s, self._start_if_down)

        def goodbye(pool: PoolService) -> object:
            return pool.beat(self.slot, incarnation, leaves=True)

        def flushed() -> None:
            if not self._is(life):
                return
            if self._telling or self._has_news:
                self._tell()
                self.timeline.after(0.05, flushed)
                return
            self.caller.call(goodbye, self._awake(left), lambda: self._is(life))

        flushed()

    def _is(self, life: int) -> bool:
        return self.up and self.life == life

    def _awake(self, take: Callable[[object], None]) -> Callable[[object], None]:
        """Delivered once the process runs again."""

        def later(answer: object) -> None:
            asleep_s = self.stopped_until_s - self.timeline.now_s
            if asleep_s > 0:
                self.timeline.after(asleep_s, lambda: later(answer))
            else:
                take(answer)

        return later

    def _every(self, period_s: float, action: Callable[[], None], life: int) -> None:
        def turn() -> None:
            if not self._is(life):
                return
            asleep_s = self.stopped_until_s - self.timeline.now_s
            if asleep_s > 0:
                self.timeline.after(asleep_s, turn)
                return
            action()
            self.timeline.after(period_s, turn)

        self.timeline.after(self.rng.uniform(0, period_s), turn)

    def _refused(self, answer: object) -> bool:
        """Superseded or unknown: this life is over, as when its engine dies."""
        if isinstance(answer, Refusal):
            self.up = False
            self.timeline.after(0.1, self._start_if_down)
        return isinstance(answer, Refusal)

    # --- work ---------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        incarnation, life = self.incarnation, self.life
        assert incarnation is not None

        def heard(answer: object) -> None:
            if self._is(life):
                self._refused(answer)

        self.caller.call(lambda pool: pool.beat(self.slot, incarnation), self._awake(heard), lambda: self._is(life))

    def _ask_for_work(self) -> None:
        if self._leasing or self.leaving or any(not work.end_told for work in self._work.values()):
            return
        self._leasing = True
        incarnation, version, life = self.incarnation, self.version, self.life
        assert incarnation is not None

        def leased(answer: object) -> None:
            if not self._is(life):
                return
            self._leasing = False
            if self._refused(answer):
                return
            if isinstance(answer, Leased):
                for granted in answer.samples:
                    self._admit(granted)
            elif isinstance(answer, Refresh):
                self._leasing = True
                self.num_reloads += answer.num_parked > 0
                self.timeline.after(LOAD_S, lambda: self._load(answer.version, life))

        self.caller.call(
            lambda pool: pool.lease(self.slot, incarnation, version), self._awake(leased), lambda: self._is(life)
        )

    def _load(self, version: int, life: int) -> None:
        """Nothing is overwritten while adopted samples run, or without a relay that has the version."""
        if not self._is(life):
            return
        self._leasing = False
        busy = any(not work.end_told for work in self._work.values())
        if not busy and version in self.held_versions():
            self.version = version

    def hear(self, command: Adopt | Cancel, incarnation_life: int) -> None:
        """From the pool, on the connection of that life."""
        if not self._is(incarnation_life):
            return
        asleep_s = self.stopped_until_s - self.timeline.now_s
        if asleep_s > 0:
            self.timeline.after(asleep_s, lambda: self.hear(command, incarnation_life))
        elif isinstance(command, Adopt):
            for granted in command.samples:
                self._admit(granted)
        else:
            for key, term in command.terms.items():
                if key in self._work and self._work[key].term <= term:
                    del self._work[key]

    def _admit(self, granted: Granted) -> None:
        known = self._work.get(granted.key)
        if known is not None and known.term >= granted.term:
            return
        declined = not granted.ended and granted.version != self.version
        length = len(granted.tokens) // TOKEN_BYTES
        self._work[granted.key] = _Work(
            granted.term, granted.version, bytearray(granted.tokens), length, granted.ended or declined,
            granted.ended, declined,
        )  # fmt: skip

    def _generate(self) -> None:
        for key, work in sorted(self._work.items()):
            if work.ended:
                if not work.declined and not work.graded:
                    work.graded, work.reward = True, self.habits.reward_of(key)
                continue
            assert work.version == self.version, f"{self.slot} has {self.version}, generates {key} of {work.version}"
            if key == self.habits.poison and work.length >= 2:
                self.die(1.0)
                return
            if work.length >= min(self.habits.length_of(key), self.habits.max_tokens):
                work.ended = True
            elif not self.leaving:
                work.tokens += token(work.version, work.length)

    @property
    def _has_news(self) -> bool:
        return any(
            work.length > work.durable or (work.ended and not work.end_told) or work.graded
            for work in self._work.values()
        )

    def _tell(self) -> None:
        """One call at a time, with everything that is not acknowledged."""
        if self._telling or not self._has_news:
            return
        incarnation, life = self.incarnation, self.life
        assert incarnation is not None
        appends = [
            Append(key, w.term, w.durable, bytes(w.tokens[TOKEN_BYTES * w.durable :]))
            for key, w in self._work.items()
            if w.length > w.durable
        ]
        ends = [
            End(key, w.term, w.length, "declined" if w.declined else "stop")
            for key, w in self._work.items()
            if w.ended and not w.end_told
        ]
        grades = [Grade(key, w.term, w.reward) for key, w in self._work.items() if w.graded]
        self._telling = True

        def told(answer: object) -> None:
            if not self._is(life):
                return
            self._telling = False
            if not self._refused(answer):
                assert isinstance(answer, Told)
                self._settle([*appends, *ends, *grades], answer.results)

        def ask(pool: PoolService) -> object:
            return pool.progress(self.slot, incarnation, appends, ends, grades)

        self.caller.call(ask, self._awake(told), lambda: self._is(life))

    def _settle(self, items: list[Append | End | Grade], answers: list[WriteResult]) -> None:
        for item, answer in zip(items, answers, strict=True):
            work = self._work.get(item.key)
            if work is None or work.term != item.term:
                continue
            if isinstance(item, Grade) and not work.end_told:
                continue  # its end was refused in this very call: both are said again
            if answer.outcome is Outcome.OK:
                work.durable = max(work.durable, min(answer.durable, work.length))
                work.end_told = work.end_told or isinstance(item, End)
                if isinstance(item, Grade) or (isinstance(item, End) and work.declined):
                    del self._work[item.key]
            elif answer.outcome is Outcome.GAP:
                work.durable = min(answer.durable, work.length)
            else:
                del self._work[item.key]
