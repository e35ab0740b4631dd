"""Suspect and dead: who may be replaced, and when nothing may be.

The pool calls a member suspect (a closed connection, or 3 s of silence); that is reversible and costs a redirect.
Dead costs the member its life, so it needs proof (an exit) or two independent signs that agree for long enough:

    alive --pool: suspect--> suspect --for 30 s (trainer 120 s), and its own health check fails--> dead
      ^                         |
      +------it is heard again--+            exit seen: dead at once

Three rules hold the hand back. The watcher starts with everything unknown: it judges by silence only after it has
itself watched for one full silent period, and again after the pool was away. While many members turn suspect
together, or the pool cannot be reached, the brake is on and nothing is deleted (a switch or a paused machine is more
likely than so many deaths at once). The brake gives up after ten minutes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from laminar.core.identity import Role


class Verdict(StrEnum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Limits:
    """How long silence may last. Defaults: design 6.2."""

    dead_after_s: float = 30.0
    trainer_dead_after_s: float = 120.0
    """A trainer that is wrongly replaced costs the work since its checkpoint, so it gets four times as long."""
    unanswered_s: float = 2.0
    """A health check that fails for this long confirms a suspicion."""
    pool_unanswered_s: float = 30.0
    registering_s: float = 120.0
    """A process that has never registered counts as suspect from this age on: imports on a busy machine take long."""
    brake_window_s: float = 10.0
    brake_members: int = 2
    brake_share: float = 0.3
    brake_gives_up_s: float = 600.0

    def silent_period_s(self, role: Role) -> float:
        return self.trainer_dead_after_s if role is Role.TRAINER else self.dead_after_s

    def brake_above(self, num_members: int) -> float:
        """More simultaneous suspects than this are a mass failure."""
        return max(float(self.brake_members), self.brake_share * num_members)


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known against one life of one member. Times are the watcher's monotonic clock; None: nothing."""

    exited: bool = False
    suspect_since_s: float | None = None
    unanswered_since_s: float | None = None
    """Its health check has failed since then (cluster: or its node is not ready)."""
    stalled: bool = False
    """The pool saw running samples without a token for stallSeconds."""
    watched_since_s: float = 0.0
    """Start of the watcher, or of its current connection to the pool."""


def verdict(role: Role, evidence: Evidence, now_s: float, limits: Limits = DEFAULT_LIMITS) -> Verdict:
    """Judges one life. Only DEAD allows deletion, and the caller holds back while the brake is on."""
    if evidence.exited:
        return Verdict.DEAD
    unanswered_s = _elapsed_s(evidence.unanswered_since_s, now_s)
    if role is Role.POOL:
        if unanswered_s is None:
            return Verdict.ALIVE
        return Verdict.DEAD if unanswered_s >= limits.pool_unanswered_s else Verdict.SUSPECT
    if evidence.stalled and now_s - evidence.watched_since_s >= limits.silent_period_s(role):
        return Verdict.DEAD
    if evidence.suspect_since_s is None:
        return Verdict.ALIVE
    # A suspicion that was inherited (the pool had it before we looked) counts from our own start.
    suspect_s = now_s - max(evidence.suspect_since_s, evidence.watched_since_s)
    confirmed = unanswered_s is not None and unanswered_s >= limits.unanswered_s
    return Verdict.DEAD if confirmed and suspect_s >= limits.silent_period_s(role) else Verdict.SUSPECT


@dataclass(frozen=True, slots=True)
class Sighting:
    """One life of a member (not the pool) at one look."""

    slot: str
    life: int
    suspect: bool
    """The pool's word; of a process that has not registered: that it is overdue."""
    answers: bool | None = None
    """The newest health check; None: none has ended since the last look."""
    exited: bool = False
    stalled: bool = False


@dataclass(frozen=True, slots=True)
class Brake:
    """Nothing is deleted while this stands. Shown as the condition MassFailureSuspected."""

    since_s: float
    reason: str


@dataclass(slots=True)
class _Signs:
    suspect_since_s: float | None = None
    unanswered_since_s: float | None = None
    exited: bool = False
    stalled: bool = False


class Watch:
    """Remembers since when each sign stands. `observe` at every turn, then ask `evidence` and `brake`.

    Invariant: a sign is never older than the watcher's start or its newest reconnection to the pool.
    """

    def __init__(self, started_s: float, limits: Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._watched_since_s = started_s
        self._signs: dict[tuple[str, int], _Signs] = {}
        self._pool_away_since_s: float | None = started_s
        self._pool_unanswered_since_s: float | None = None
        self._mass_since_s: float | None = None

    def observe(self, now_s: float, sightings: Iterable[Sighting], *, pool_reachable: bool) -> None:
        """One look at every current life. Lives that are not in it are forgotten."""
        if not pool_reachable:
            if self._pool_away_since_s is None:
                self._pool_away_since_s = now_s
        elif self._pool_away_since_s is not None:
            self._pool_away_since_s = None
            self._watched_since_s = now_s
            for signs in self._signs.values():
                signs.suspect_since_s = None
                signs.unanswered_since_s = None
        seen: dict[tuple[str, int], _Signs] = {}
        for sighting in sightings:
            key = (sighting.slot, sighting.life)
            seen[key] = _updated(self._signs.get(key, _Signs()), sighting, now_s)
        self._signs = seen
        self._watch_mass(now_s)

    def observe_pool(self, now_s: float, *, answers: bool) -> None:
        """A health check of the pool process ended. Its first failure starts the clock; one answer stops it."""
        if answers:
            self._pool_unanswered_since_s = None
        elif self._pool_unanswered_since_s is None:
            self._pool_unanswered_since_s = now_s

    def forget_pool(self) -> None:
        """The pool process was replaced: nothing is held against the new one."""
        self._pool_unanswered_since_s = None

    def evidence(self, slot: str, life: int) -> Evidence:
        signs = self._signs.get((slot, life), _Signs())
        return Evidence(
            exited=signs.exited,
            suspect_since_s=signs.suspect_since_s,
            unanswered_since_s=signs.unanswered_since_s,
            stalled=signs.stalled,
            watched_since_s=self._watched_since_s,
        )

    def pool_evidence(self, *, exited: bool) -> Evidence:
        return Evidence(exited=exited, unanswered_since_s=self._pool_unanswered_since_s)

    def brake(self, now_s: float) -> Brake | None:
        """The brake, if it is on."""
        for since_s, reason in (
            (self._pool_away_since_s, "the pool cannot be reached"),
            (self._mass_since_s, "many members went silent together"),
        ):
            if since_s is not None and now_s - since_s < self._limits.brake_gives_up_s:
                return Brake(since_s, reason)
        return None

    def _watch_mass(self, now_s: float) -> None:
        onsets_s = [signs.suspect_since_s for signs in self._signs.values() if not signs.exited]
        standing_s = [since_s for since_s in onsets_s if since_s is not None]
        allowed = self._limits.brake_above(len(onsets_s))
        if len(standing_s) <= allowed:
            self._mass_since_s = None
            return
        recent = sum(now_s - since_s <= self._limits.brake_window_s for since_s in standing_s)
        if self._mass_since_s is None and recent > allowed:
            self._mass_since_s = now_s


def _updated(signs: _Signs, sighting: Sighting, now_s: float) -> _Signs:
    if not sighting.suspect:
        signs.suspect_since_s = None
    elif signs.suspect_since_s is None:
        signs.suspect_since_s = now_s
    if sighting.answers:
        signs.unanswered_since_s = None
    elif sighting.answers is False and signs.unanswered_since_s is None:
        signs.unanswered_since_s = now_s
    signs.exited = sighting.exited
    signs.stalled = sighting.stalled
    return signs


def _elapsed_s(since_s: float | None, now_s: float) -> float | None:
    return None if since_s is None else now_s - since_s
