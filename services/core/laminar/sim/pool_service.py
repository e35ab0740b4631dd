"""A pool in virtual time: one ledger with its register and members, on a disk that outlives it.

ask -> decide on the ledger -> write -> answer          a kill loses what is not written, and every answer with it
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from laminar.core.decisions import Grant, LeaseDecision, LedgerPlan, Loss, Outcome, StepConflict, Wait, WriteResult
from laminar.core.identity import SampleKey
from laminar.core.ledger import Ledger
from laminar.core.redirect import Destination
from laminar.core.samples import Group, Holder, Sample, SampleState, SealedBatch
from laminar.core.schedule import Schedule
from laminar.core.versions import VersionRegister
from laminar.sim.pool_disk import Disk, transaction
from laminar.sim.timeline import Timeline

SILENT_S = 3.0
KEEP_VERSIONS, RETAIN_SLOTS = 2, 1
MakeLedger = Callable[[LedgerPlan, Schedule, VersionRegister], Ledger]


class Refusal(Enum):
    """Answers that mean: you are somebody else by now."""

    SUPERSEDED = "superseded"
    UNREGISTERED = "unregistered"
    OLD_ATTEMPT = "oldAttempt"
    BUSY = "busy"
    """The store has not written what was decided before; call again."""


@dataclass(frozen=True, slots=True)
class Append:
    key: SampleKey
    term: int
    offset: int
    tokens: bytes


@dataclass(frozen=True, slots=True)
class End:
    """`reason` as in FinishItem; `grade`: the verdict of a grader that has answered by now."""

    key: SampleKey
    term: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class Grade:
    key: SampleKey
    term: int
    reward: float | None


@dataclass(frozen=True, slots=True)
class Granted:
    """A sample as it goes out: its own copy of what is durable."""

    key: SampleKey
    term: int
    version: int
    tokens: bytes
    ended: bool


@dataclass(frozen=True, slots=True)
class Leased:
    """A grant."""

    samples: tuple[Granted, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """One result an item, in the order of the call."""

    results: list[WriteResult]


@dataclass(frozen=True, slots=True)
class Begun:
    """Where an attempt goes on; `version` of that step, if there is one."""

    step: int
    version: int | None


@dataclass(frozen=True, slots=True)
class Delivered:
    """A sealed batch with its groups, in order."""

    batch: SealedBatch
    groups: list[Group]


@dataclass(frozen=True, slots=True)
class Adopt:
    samples: tuple[Granted, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Terms up to the given one are over."""

    terms: dict[SampleKey, int]


@dataclass(slots=True)
class Member:
    nonce: str
    incarnation: int
    heard_s: float
    suspect: bool = False
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """Of one run; `holds` answers what relays have, `command` carries a command to a replica."""

    plan: LedgerPlan
    schedule: Schedule
    make_ledger: MakeLedger
    answers_before_durable: bool = False
    """A planted bug."""


@dataclass(slots=True)
class Relays:
    """What the chain holds: the newest versions, and as many more as fit of those that are asked for."""

    newest: list[int] = field(default_factory=list[int])
    wanted: list[int] = field(default_factory=list[int])

    def publish(self, version: int) -> None:
        kept = [v for v in self.wanted if v in self.newest][:RETAIN_SLOTS]
        latest = sorted({*self.newest, version})[-KEEP_VERSIONS:]
        self.newest = sorted({*latest, *kept})

    @property
    def held(self) -> frozenset[int]:
        return frozenset(self.newest)


class PoolService:
    """One life of the pool."""

    def __init__(
        self, timeline: Timeline, rng: random.Random, setting: Setting, disk: Disk, relays: Relays,
        command: Callable[[str, Adopt | Cancel], bool],
    ) -> None:  # fmt: skip
        self._timeline, self._rng, self._setting, self._disk, self._relays = timeline, rng, setting, disk, relays
        self._command = command
        self.dead = False
        self.register = VersionRegister([disk.versions[version] for version in sorted(disk.versions)])
        self.ledger = setting.make_ledger(setting.plan, setting.schedule, self.register)
        sealed = [batch for step, batch in sorted(disk.batches.items()) if step > disk.committed_step]
        self.ledger.restore(disk.live_groups(), sealed, disk.counters, disk.position, disk.committed_step)
        self.attempt, self.checkpoint_step = disk.attempt, disk.checkpoint_step
        self.incarnations = dict(disk.incarnations)
        self.members: dict[str, Member] = {}
        self._unheard = set(self.incarnations)
        """Replicas whose command connection is new: what was said before may not have reached them."""
        self._new_batches: list[SealedBatch] = []
        self._started_s = timeline.now_s
        self._written_s = timeline.now_s
        for slot, incarnation in self.incarnations.items():
            self.members[slot] = Member("", incarnation, timeline.now_s)

    # --- calls ------------------------------------------------------------------------------------------------------

    def serve(self, ask: Callable[[PoolService], object], answer: Callable[[object], None]) -> None:
        """Decides now; answers once that is written."""
        result = ask(self)
        self.commit(lambda: answer(result))

    def commit(self, then: Callable[[], None] = lambda: None) -> None:
        batches, self._new_batches = self._new_batches, []
        rows = transaction(
            self.ledger, self.ledger.drain(), batches, [self.register.row(v) for v in sorted(self.register.dirty)],
            self.incarnations, self.attempt, self.checkpoint_step,
        )  # fmt: skip
        self.register.dirty.clear()
        # One writer: what was decided first is written first.
        self._written_s = max(self._written_s, self._timeline.now_s + self._rng.uniform(0.0, 0.01))

        def write() -> None:
            if not self.dead:
                self._disk.write(rows)
                if not self._setting.answers_before_durable:
                    then()

        if self._setting.answers_before_durable:
            then()
        self._timeline.after(self._written_s - self._timeline.now_s, write)

    def join(self, slot: str, nonce: str) -> int:
        known = self.members.get(slot)
        if known is not None and known.nonce == nonce:
            return known.incarnation
        incarnation = self.incarnations.get(slot, 0) + 1
        self.incarnations[slot] = incarnation
        self.members[slot] = Member(nonce, incarnation, self._timeline.now_s)
        if known is not None:
            self._lose(Holder(slot, known.incarnation), Loss.LEFT if known.leaving else Loss.DEAD)
        return incarnation

    def beat(self, slot: str, incarnation: int, *, leaves: bool = False) -> Refusal | None:
        member = self._heard(slot, incarnation)
        if isinstance(member, Refusal):
            return member
        if leaves and not member.leaving:
            member.leaving = True
            self._lose(Holder(slot, incarnation), Loss.LEFT)
        if slot in self._unheard:
            self._unheard.discard(slot)
            held = self.ledger.held_by(Holder(slot, incarnation))
            self._adopt(slot, [s for s in held if s.moves or s.state is SampleState.FINISHED])
        return None

    def lease(self, slot: str, incarnation: int, version: int | None) -> Refusal | LeaseDecision | Leased:
        member = self._heard(slot, incarnation)
        if isinstance(member, Refusal):
            return member
        holder = Holder(slot, incarnation)
        running = [s for s in self.ledger.held_by(holder) if s.state is SampleState.LEASED]
        if any(sample.version != version for sample in running):
            self._lose(holder, Loss.LEFT)
        if member.leaving:
            return Wait()
        decision = self.ledger.lease(holder, version, self._timeline.now_s, self._kept())
        if isinstance(decision, Grant):
            return Leased(tuple(_granted(sample) for sample in decision.samples))
        return decision

    def progress(
        self, slot: str, incarnation: int, appends: list[Append], ends: list[End], grades: list[Grade]
    ) -> Refusal | Told:
        member = self._heard(slot, incarnation)
        if isinstance(member, Refusal):
            return member
        holder, writes = Holder(slot, incarnation), self.ledger.writes
        results: list[WriteResult] = []
        before = [self._fenced_off(holder, item) for item in (*appends, *ends, *grades)]
        for item in appends:
            results.append(
                writes.append(holder, item.key, item.term, item.offset, item.tokens, bytes(len(item.tokens)))
            )
            assert results[-1].outcome is not Outcome.MISMATCH, f"{item} does not continue what is durable"
        for item in ends:
            if item.reason == "declined":
                results.append(writes.decline(holder, item.key, item.term))
            else:
                now_s = self._timeline.now_s
                results.append(writes.finish(holder, item.key, item.term, item.length, item.reason, "", now_s))
        results += [writes.grade(holder, item.key, item.term, item.reward, {}, "") for item in grades]
        after = [self._fenced_off(holder, item) for item in (*appends, *ends, *grades)]
        assert all(None in (was, now) or was == now for was, now in zip(before, after, strict=True)), (
            f"{slot}#{incarnation} has changed a sample that is not its own"
        )
        return Told(results)

    def _fenced_off(self, holder: Holder, item: Append | End | Grade) -> object:
        """What the sample is if this life may not write it under this term; None if it may, or the group has ended."""
        sample = self.ledger.sample(item.key)
        if sample is None or (sample.holder, sample.term) == (holder, item.term):
            return None
        return sample.term, sample.length, sample.reward, sample.finish_reason

    # --- the trainer --------------------------------------------------------------------------------------------------

    def begin(self, attempt: int) -> Begun | Refusal:
        """From here on this attempt trains."""
        if attempt < self.attempt:
            return Refusal.OLD_ATTEMPT
        if self._written_s > self._timeline.now_s:
            return Refusal.BUSY
        if attempt > self.attempt:
            self.attempt = attempt
            self.register.burn_before(attempt)
            self.ledger.roll_back(self.checkpoint_step, self._disk.consumed_after(self.checkpoint_step))
        newest = self.register.newest
        head = None if newest is None else newest.version
        return Begun(self.checkpoint_step, self.register.version_of_step(self.checkpoint_step, head))

    def take(self, attempt: int, step: int) -> Delivered | Refusal | None:
        if attempt != self.attempt:
            return Refusal.OLD_ATTEMPT
        known = step in self.ledger.batches
        try:
            batch = self.ledger.seal(step)
        except StepConflict:
            return None
        if batch is None:
            return None
        if not known:
            self._new_batches.append(batch)
        return Delivered(batch, self.ledger.batch_groups(step))

    def end_step(self, attempt: int, step: int, *, checkpoint: bool) -> Refusal | None:
        """Committed, and saved if `checkpoint`."""
        if attempt != self.attempt:
            return Refusal.OLD_ATTEMPT
        self.ledger.commit(step)
        if checkpoint:
            self.checkpoint_step = max(self.checkpoint_step, step)
        return None

    def publish(self, attempt: int, step: int, parent: int | None) -> int | Refusal:
        """Reserved, handed over and visible in one."""
        if attempt != self.attempt:
            return Refusal.OLD_ATTEMPT
        version = self.register.reserve(attempt, step, parent).version
        self.register.report_complete(version, f"digest-{version}", "relay-0", 1)
        self._relays.publish(version)
        return version

    # --- its own clock ------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Who went silent; versions that are gone."""
        for slot, member in sorted(self.members.items()):
            if not (member.suspect or member.leaving) and self._timeline.now_s - member.heard_s > SILENT_S:
                member.suspect = True
                self._lose(Holder(slot, member.incarnation), Loss.SUSPECT)
        live = [slot for slot, member in sorted(self.members.items()) if not (member.suspect or member.leaving)]
        if live:
            self._adopt(live[0], self.ledger.adopt_ungraded(Holder(live[0], self.members[live[0]].incarnation)))
        kept = self._kept()
        if kept is not None:
            self.ledger.restart_unkept(kept)
        self._relays.wanted = self.ledger.unfinished_versions()
        self.commit()

    def _kept(self) -> frozenset[int] | None:
        return self._relays.held if self._timeline.now_s - self._started_s > 1.0 else None

    def _heard(self, slot: str, incarnation: int) -> Member | Refusal:
        member = self.members.get(slot)
        if member is None:
            return Refusal.UNREGISTERED
        if member.incarnation != incarnation:
            return Refusal.SUPERSEDED
        if member.suspect:
            self.ledger.absolve(Holder(slot, incarnation))
        member.heard_s, member.suspect = self._timeline.now_s, False
        return member

    def _lose(self, holder: Holder, loss: Loss) -> None:
        running = self.ledger.running()
        destinations = [
            Destination(each, held[0].version if (held := running.get(each)) else None, 8 - len(held or ()))
            for slot, member in sorted(self.members.items())
            if not (member.suspect or member.leaving) and (each := Holder(slot, member.incarnation)) != holder
        ]
        moved = self.ledger.lose(holder, destinations, "lost", loss=loss, kept=self._kept())
        if moved:
            self._say(holder.slot, Cancel({move.sample.key: move.ended_term for move in moved}))
        for to in sorted({move.to for move in moved if move.to is not None}):
            self._adopt(to.slot, [move.sample for move in moved if move.to == to])

    def _adopt(self, slot: str, samples: list[Sample]) -> None:
        if samples:
            self._say(slot, Adopt(tuple(_granted(sample) for sample in samples)))

    def _say(self, slot: str, command: Adopt | Cancel) -> None:
        def leave() -> None:
            if not self.dead and not self._command(slot, command):
                self._unheard.add(slot)

        self.commit(leave)


def _granted(sample: Sample) -> Granted:
    assert sample.version is not None
    ended = sample.state is SampleState.FINISHED
    return Granted(sample.key, sample.term, sample.version, bytes(sample.tokens), ended)
