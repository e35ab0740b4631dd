"""Whether the ranks of a training attempt get on. Pure; the agent that started them looks about once a second.

A rank shows two signs: a beat, which a thread of its own makes (the process runs), and a mark at each phase that its
training thread enters (the work goes on). The first of these that stands too long ends the attempt:

    one of the group's processes is stopped (SIGSTOP)     30 s
    a rank has no beat, though nothing stopped it         120 s
    a rank makes no mark, in START or SAVE                30 min   imports, model, restoring; copying a checkpoint
                          in STEP                         10 x the longest step so far, between 60 s and 30 min;
                                                          30 min until 3 steps are known: compilation, warm-up
                          in WAIT                         never: the calls to pool and master have deadlines

WAIT is safe to leave alone because ranks meet at the end of each WAIT: while one waits, all are in WAIT.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Phase(IntEnum):
    START = 0
    WAIT = 1
    STEP = 2
    SAVE = 3
    """Copying a checkpoint; the last one and the model folder, written whole."""
    END = 4
    """Nothing is left to do: its beats may end too."""


@dataclass(frozen=True, slots=True)
class RankSign:
    """What one rank shows. All numbers only grow; `beats` 0: it has not come so far yet."""

    rank: int
    phase: Phase
    marks: int
    beats: int
    num_steps: int = 0
    longest_step_s: float = 0.0
    """Of its `num_steps` finished steps, as it measured them itself."""


@dataclass(frozen=True, slots=True)
class ProgressLimits:
    stopped_s: float = 30.0
    """As long as any member may be silent; a debugger that looks for a moment does no harm."""
    silent_s: float = 120.0
    """A thread that cannot run for so long: no other sign agrees, so it gets as long as a silent trainer."""
    slow_s: float = 1800.0
    """Where nothing is measured yet: a model of 100 GB from a network volume, the first compilation."""
    step_least_s: float = 60.0
    step_factor: float = 10.0
    """Steps differ by the lengths of their responses, and a busy machine adds to it; never by ten times."""
    steps_known: int = 3
    lag_s: float = 5.0
    """A longer pause between two looks is the watcher's own and counts against nobody."""


@dataclass(frozen=True, slots=True)
class Hang:
    """`reason`: one sentence for people."""

    reason: str


@dataclass(slots=True)
class _Rank:
    sign: RankSign
    beat_s: float
    marked_s: float


class GroupWatch:
    """Memory of one attempt's group. Ask `look` again and again; the first Hang is the attempt's end."""

    def __init__(self, limits: ProgressLimits | None = None) -> None:
        self._limits = limits or ProgressLimits()
        self._looked_s: float | None = None
        self._ranks: dict[int, _Rank] = {}
        self._stopped_since_s: dict[int, float] = {}

    @property
    def step_limit_s(self) -> float:
        """How long a step may take now."""
        limits, signs = self._limits, [rank.sign for rank in self._ranks.values()]
        if min((sign.num_steps for sign in signs), default=0) < limits.steps_known:
            return limits.slow_s
        longest_s = max(sign.longest_step_s for sign in signs)
        return min(limits.slow_s, max(limits.step_least_s, limits.step_factor * longest_s))

    def look(self, now_s: float, signs: Iterable[RankSign], stopped: Iterable[int] = ()) -> Hang | None:
        """`stopped`: pids of the group's processes, the launcher included, that are stopped at this moment."""
        self._forgive_lag(now_s)
        self._stopped_since_s = {pid: self._stopped_since_s.get(pid, now_s) for pid in stopped}
        for sign in sorted(signs, key=lambda sign: sign.rank):
            self._learn(now_s, sign)
        for pid, since_s in sorted(self._stopped_since_s.items()):
            if now_s - since_s >= self._limits.stopped_s:
                return Hang(f"process {pid} of the group has been stopped for {now_s - since_s:.0f} s")
        for rank in self._ranks.values():
            hang = self._judge(now_s, rank)
            if hang is not None:
                return hang
        return None

    def _forgive_lag(self, now_s: float) -> None:
        lag_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        if lag_s <= self._limits.lag_s:
            return
        self._stopped_since_s = {pid: since_s + lag_s for pid, since_s in self._stopped_since_s.items()}
        for rank in self._ranks.values():
            rank.beat_s += lag_s
            rank.marked_s += lag_s

    def _learn(self, now_s: float, sign: RankSign) -> None:
        known = self._ranks.get(sign.rank)
        if known is None:
            self._ranks[sign.rank] = _Rank(sign, now_s, now_s)
            return
        if sign.beats != known.sign.beats:
            known.beat_s = now_s
        if sign.marks != known.sign.marks:
            known.marked_s = now_s
        known.sign = sign

    def _judge(self, now_s: float, rank: _Rank) -> Hang | None:
        sign, limits = rank.sign, self._limits
        silent_s, idle_s = now_s - rank.beat_s, now_s - rank.marked_s
        if sign.beats and sign.phase is not Phase.END and silent_s >= limits.silent_s:
            return Hang(f"rank {sign.rank} has shown no sign of life for {silent_s:.0f} s")
        match sign.phase:
            case Phase.WAIT:
                return None
            case Phase.STEP:
                limit_s, doing = self.step_limit_s, "in a training step"
            case Phase.START:
                limit_s, doing = limits.slow_s, "at its start"
            case Phase.SAVE:
                limit_s, doing = limits.slow_s, "while saving"
            case Phase.END:
                limit_s, doing = limits.slow_s, "at its end"
        if idle_s < limit_s:
            return None
        return Hang(f"rank {sign.rank} has made no progress {doing} for {idle_s:.0f} s (limit {limit_s:.0f} s)")
