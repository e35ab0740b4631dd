"""The reconciler: what is observed of a job -> what to do next. Pure; processes and pods are driven by it alike.

Each turn looks at every slot and takes its next step towards the wanted state; the driver applies the actions in
order, observes again and calls again. Nothing is remembered here: what has to last is in the snapshot.

    slot     (nothing) --Create--> starting -> running --exit--> exited --[Fence]--> Create(life + 1)
                                                  |--dead--> [Fence] --> Kill --> exited
    chain    ready relays changed --PublishChain(epoch + 1)--> acknowledged by each relay and the pool
    job      starting -> running -> [stopping] -> complete | stopped | failed --Stop, Kill--> nothing is left

Invariants (property tests): a slot never has two lives at once; a healthy member is never killed; nothing is killed
while the brake is on; a rollout is fenced before it is killed or replaced; epochs and attempts only grow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from laminar.core.chain import ChainNode, RelayView, plan_chain
from laminar.core.identity import Incarnation, Role, Version
from laminar.core.liveness import DEFAULT_LIMITS, Limits, Verdict, verdict
from laminar.core.restarts import Restarts, exhausted
from laminar.core.snapshot import JobPhase, Member, MemberPhase, Place, PoolStage, Snapshot, places

EXIT_BAD_INPUT = 2
"""A child's exit code for a mistake that only the user can mend: starting it again would change nothing."""
STOP_GRACE_S = 10.0
"""A member that was asked to stop is killed after this."""
CHAIN_START_S = 10.0
"""The first chain waits this long for all relays: each later join would restart the first broadcast."""
SETTLE_S = 5.0
"""How long the pool may take to show what a trainer that exited with 0 has told it: its stream is half a second old."""
HOLDINGS_KNOWN_S = 5.0
"""Relays tell in each heartbeat what they hold: after this, what a pool has not heard of is not there."""
SHOW_BRAKE_AFTER_S = 3.0
"""A pool that restarts within this is not worth a condition."""
MASS_FAILURE = "MassFailureSuspected"


@dataclass(frozen=True, slots=True)
class Create:
    """Starts a life. The driver stores `life` (a trainer's: as the attempt) before the process or pod exists."""

    slot: str
    role: Role
    index: int
    life: int
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Fence:
    """Tells the pool that nothing this incarnation says counts any more."""

    slot: str
    life: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Ends a life and all of its descendants, without asking."""

    slot: str
    life: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Asks a life to flush and exit with 0."""

    slot: str
    life: int
    reason: str


@dataclass(frozen=True, slots=True)
class PublishChain:
    """The driver stores epoch and members, then tells each relay in `to` and the pool. Repeating it is harmless."""

    epoch: int
    members: tuple[ChainNode, ...]
    to: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SetPhase:
    phase: JobPhase
    reason: str


@dataclass(frozen=True, slots=True)
class SetCondition:
    """`text` empty: the condition has passed."""

    name: str
    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class RequestStop:
    """Asks the pool to end the job after the current step, with a checkpoint."""

    reason: str


Action = Create | Fence | Kill | Stop | PublishChain | RequestStop | SetPhase | SetCondition


def reconcile(snapshot: Snapshot, limits: Limits = DEFAULT_LIMITS) -> tuple[Action, ...]:
    """The next actions, to be applied in order. Empty: all is as wanted, or only time or news can help."""
    if snapshot.phase.ended:
        return tuple(_wind_down(snapshot))
    end = _outcome(snapshot)
    if end is not None:
        return (end,)
    actions: list[Action] = []
    actions.extend(_condition(snapshot))
    for place in places(snapshot.spec):
        actions.extend(_step(snapshot, place, limits))
    actions.extend(_surplus(snapshot))
    actions.extend(_chain(snapshot))
    actions.extend(_phase(snapshot))
    return tuple(actions)


def _outcome(s: Snapshot) -> SetPhase | None:
    """The end of the job, if it has come."""
    for member in s.members:
        if member.exit is not None and member.exit.code == EXIT_BAD_INPUT:
            return SetPhase(JobPhase.FAILED, member.exit.last_words or f"{member.slot} refused its input")
    for member in s.members:
        why = exhausted(s.restarts.get(member.slot, Restarts()), member.role, s.spec.backoff_limit)
        if why is not None and member.exit is not None and not _finished(s, member):
            words = f": {member.exit.last_words}" if member.exit.last_words else ""
            return SetPhase(JobPhase.FAILED, f"{member.slot} {why}{words}")
    if s.pool.stage is PoolStage.FAILED:
        return SetPhase(JobPhase.FAILED, s.pool.reason or "the pool declared the job failed")
    # A pool that is away comes back and says so again, and the end of the record is still to be asked of it.
    return _orderly_end(s) if s.pool.reachable else None


def _orderly_end(s: Snapshot) -> SetPhase | None:
    trainer = _newest(s, "trainer-0")
    left = trainer is not None and trainer.exit is not None and trainer.exit.code == 0
    if s.pool.stage is PoolStage.COMPLETE and left:
        return SetPhase(JobPhase.COMPLETE, "all steps are done")
    # Whatever ended a trainer, or keeps the next one: all that is committed is in a checkpoint.
    trains = trainer is not None and trainer.exit is None and trainer.life <= s.pool.attempt
    if s.pool.stage is PoolStage.STOPPED and (left or (s.stop_acknowledged and not trains)):
        return SetPhase(JobPhase.STOPPED, s.pool.reason or "stopped")
    return None


def _finished(s: Snapshot, member: Member) -> bool:
    """A trainer that left with 0 has finished, unless the pool still waits for steps a good while later.

    The pool knows of a stop or of the last step before the trainer exits, but its view may be a moment old.
    """
    if member.role is not Role.TRAINER or member.exit is None or member.exit.code != 0:
        return False
    if s.pool.stage is PoolStage.FINISHING:
        return not _weights_are_gone(s, member.exit.at_s)
    return s.pool.stage is not PoolStage.BUSY or not s.pool.reachable or s.now_s - member.exit.at_s < SETTLE_S


def _weights_are_gone(s: Snapshot, since_s: float) -> bool:
    """No living relay holds the version that the evaluation is of, and the trainer, which had it, left at `since_s`."""
    pools_s = [m.started_s for m in s.members if m.role is Role.POOL]
    if not s.pool.reachable or s.pool.newest_version is None or s.now_s - max(since_s, *pools_s) < HOLDINGS_KNOWN_S:
        return False
    relays = [m for m in s.members if m.role is Role.RELAY and m.phase is not MemberPhase.EXITED]
    return all(m.newest_version is None or m.newest_version < s.pool.newest_version for m in relays)


def _step(s: Snapshot, place: Place, limits: Limits) -> Iterator[Action]:
    """The next step of one slot."""
    lives = [m for m in s.members if m.slot == place.slot]
    for member in lives:
        if member.phase is not MemberPhase.EXITED:
            yield from _judge(s, member, limits)
    if any(m.phase is not MemberPhase.EXITED for m in lives):
        return
    for member in lives:
        # Waiting for the pool here costs nothing: a replacement could not register without it either.
        if _needs_fence(member):
            if s.pool.reachable:
                yield Fence(member.slot, member.life, _incarnation(member), _death(member))
            return
    last = _newest(s, place.slot)
    if last is not None and _finished(s, last):
        return
    if s.now_s < s.restarts.get(place.slot, Restarts()).not_before_s:
        return
    life = _next_life(s, place)
    yield Create(place.slot, place.role, place.index, life, place.node, "wanted" if last is None else _death(last))


def _judge(s: Snapshot, member: Member, limits: Limits) -> Iterator[Action]:
    """A living member: left alone unless it is dead and the brake is off."""
    if verdict(member.role, member.evidence, s.now_s, limits) is not Verdict.DEAD:
        return
    # The pool's own silence puts the brake on; it must not keep the pool from being replaced.
    if s.brake is not None and member.role is not Role.POOL:
        return
    reason = "makes no progress" if member.evidence.stalled else "silent, and its health check fails"
    if _needs_fence(member):
        yield Fence(member.slot, member.life, _incarnation(member), reason)
    else:
        yield Kill(member.slot, member.life, reason)


def _needs_fence(member: Member) -> bool:
    return member.role is Role.ROLLOUT and member.incarnation is not None and not member.fenced


def _incarnation(member: Member) -> int:
    assert member.incarnation is not None
    return member.incarnation


def _death(member: Member) -> str:
    if member.exit is None or member.exit.code is None:
        return f"life {member.life} is lost"
    code = member.exit.code
    return f"life {member.life} was ended by signal {-code}" if code < 0 else f"life {member.life} exited with {code}"


def _next_life(s: Snapshot, place: Place) -> int:
    seen = [m.life for m in s.members if m.slot == place.slot]
    stored = s.lives.get(place.slot, 0)
    if place.role is Role.TRAINER:
        return max([stored, s.attempt, s.pool.attempt, *seen]) + 1
    return max([stored, *seen]) + 1


def _newest(s: Snapshot, slot: str) -> Member | None:
    return max((m for m in s.members if m.slot == slot), key=lambda m: m.life, default=None)


def _surplus(s: Snapshot) -> Iterator[Action]:
    """Scaled down: the highest index first, its work moved before it is asked to leave."""
    wanted = {place.slot for place in places(s.spec)}
    surplus = [m for m in s.members if m.slot not in wanted and m.phase is not MemberPhase.EXITED]
    for member in sorted(surplus, key=lambda m: (m.role, -m.index, m.life)):
        if _needs_fence(member):
            if s.pool.reachable:
                yield Fence(member.slot, member.life, _incarnation(member), "scaled down")
        else:
            yield from _leave(s, member, "scaled down")


def _leave(s: Snapshot, member: Member, reason: str) -> Iterator[Action]:
    if member.stopping_since_s is None:
        yield Stop(member.slot, member.life, reason)
    elif s.now_s - member.stopping_since_s >= STOP_GRACE_S and (s.brake is None or s.phase.ended):
        yield Kill(member.slot, member.life, f"did not leave within {STOP_GRACE_S:.0f} s")


def _wind_down(s: Snapshot) -> Iterator[Action]:
    """The pool leaves last: the others flush to it."""
    living = [m for m in s.members if m.phase is not MemberPhase.EXITED]
    others = [m for m in living if m.role is not Role.POOL]
    for member in sorted(others or living, key=lambda m: (m.slot, m.life)):
        yield from _leave(s, member, f"the job is {s.phase}")


def _chain(s: Snapshot) -> Iterator[Action]:
    """A new epoch for each change of membership; the same one again for those who have not acknowledged it."""
    relays = [m for m in s.members if m.role is Role.RELAY and m.phase is not MemberPhase.EXITED]
    ready = [_relay_view(m) for m in relays if m.ready and m.incarnation is not None and m.address]
    if not ready or not s.pool.reachable:
        return
    known = {(node.slot, node.incarnation) for node in s.chain.members}
    starts_anew = all((view.slot, view.incarnation) not in known for view in ready)
    waited_s = s.now_s - s.started_s
    if starts_anew and len(ready) < len(s.spec.nodes) and waited_s < CHAIN_START_S:
        return
    planned = plan_chain(s.chain.members, ready, s.chain.apart)
    listeners = [(m.slot, m.life) for m in s.members if _listens(m)]
    if planned is not None or s.chain.highest_reported > s.chain.epoch:
        members = s.chain.members if planned is None else planned
        epoch = max(s.chain.epoch, s.chain.highest_reported) + 1
        reason = _membership_change(s.chain.members, members)
        yield PublishChain(epoch, members, tuple(slot for slot, _ in listeners), reason)
        return
    missing = tuple(slot for slot, life in listeners if (slot, life) not in s.chain.acknowledged)
    if missing:
        yield PublishChain(s.chain.epoch, s.chain.members, missing, "not acknowledged yet")


def _relay_view(member: Member) -> RelayView:
    newest = None if member.newest_version is None else Version(member.newest_version)
    return RelayView(member.slot, Incarnation(_incarnation(member)), member.address, member.node, newest)


def _listens(member: Member) -> bool:
    """Who is told the chain: the relays in it and the pool."""
    if member.phase is MemberPhase.EXITED:
        return False
    return member.role is Role.POOL or (member.role is Role.RELAY and member.ready)


def _membership_change(before: tuple[ChainNode, ...], after: tuple[ChainNode, ...]) -> str:
    old, new = [node.slot for node in before], [node.slot for node in after]
    left, joined = sorted(set(old) - set(new)), sorted(set(new) - set(old))
    changes = [f"{', '.join(slots)} {verb}" for slots, verb in ((left, "left"), (joined, "joined")) if slots]
    return "; ".join(changes) or "a member came back"


def _condition(s: Snapshot) -> Iterator[Action]:
    shown = s.conditions.get(MASS_FAILURE, "")
    braking = s.brake is not None and s.phase is not JobPhase.STARTING
    if braking and s.brake is not None and s.now_s - s.brake.since_s >= SHOW_BRAKE_AFTER_S:
        if shown != s.brake.reason:
            yield SetCondition(MASS_FAILURE, s.brake.reason, s.brake.reason)
    elif shown and not braking:
        yield SetCondition(MASS_FAILURE, "", "it has passed")


def _phase(s: Snapshot) -> Iterator[Action]:
    if s.stop_requested and s.pool.reachable and not s.stop_acknowledged:
        yield RequestStop("asked to stop")
    if s.stop_requested and s.phase is not JobPhase.STOPPING:
        yield SetPhase(JobPhase.STOPPING, "asked to stop")
    elif s.phase is JobPhase.STARTING and s.pool.reachable and s.chain.acknowledged and s.pool.attempt >= s.attempt > 0:
        yield SetPhase(JobPhase.RUNNING, f"attempt {s.attempt} has begun")
