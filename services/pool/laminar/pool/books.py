"""The pool's books: every state machine of one job, and the one way in which what they decide becomes durable.

    handler:  decide on core objects (no await)  ->  await books.commit()  ->  answer

`commit` turns what changed into rows in the same turn of the loop in which it was decided, so rows are written in the
order of the decisions. Commands to replicas leave only after the rows that they speak of are durable.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from laminar.core.checkpoints import CheckpointRegister, CheckpointRow
from laminar.core.evaluation import EvalPoint, EvalSample, EvaluationRound
from laminar.core.ledger import Changes, Ledger, LedgerPlan
from laminar.core.samples import Group, SealedBatch
from laminar.core.schedule import make_schedule
from laminar.core.versions import VersionRegister, VersionRow
from laminar.pool import rows
from laminar.pool.members import Members
from laminar.pool.prompts import PromptBook
from laminar.pool.restore import KEPT, REMOVABLE, Stored
from laminar.pool.rows import Op
from laminar.pool.signals import Clock, Signal
from laminar.pool.store import Store
from laminar.shell.answers import Refusal
from laminar.shell.logs import fields
from laminar.wire.dataplane import Command
from laminar.wire.messages import ChainEpoch, Event, PoolPhase, Role, StepRow
from laminar.wire.spec import LaminarJob

log = logging.getLogger(__name__)

COMMIT_LIMIT_S = 5.0
"""A caller that waits longer for the disk is told to call again; its rows stay in the store's queue."""
STORE_BUSY = ("StoreBusy", "the ledger's disk is slow; call again")
EVENTS_IN_MEMORY = 2000
EVENTS_STORED = 5000


@dataclass(frozen=True, slots=True)
class JobIdentity:
    job: LaminarJob
    uid: str
    generation: int


@dataclass(slots=True)
class News:
    """What long polls wait for. `batches`: a group may be ready, or the phase changed."""

    leases: Signal
    batches: Signal
    versions: Signal
    members: Signal


class Books:
    """Invariant: in memory = in the store + what `commit` has submitted + what it will submit next."""

    def __init__(self, identity: JobIdentity, prompts: PromptBook, store: Store, stored: Stored, clock: Clock) -> None:
        self.identity, self.spec, self.prompts = identity, identity.job.spec, prompts
        self.store, self.clock = store, clock
        self.register = VersionRegister(stored.versions)
        self.ledger = Ledger(_plan(identity.job, prompts), make_schedule(self.spec.schedule.type.value), self.register)
        self.ledger.restore(stored.groups, stored.batches, stored.counters, stored.position, stored.committed_step)
        kept = [row for row, state in stored.checkpoints if state == KEPT]
        self.checkpoints = CheckpointRegister(self.spec.trainer.checkpoint.keep, kept)
        self.removable = [row for row, state in stored.checkpoints if state == REMOVABLE]
        self.members = Members(stored.members, clock.monotonic_s())
        self.rounds = dict(stored.rounds)
        self.steps = stored.steps
        self.events = deque(stored.events, maxlen=EVENTS_IN_MEMORY)
        self.event_seq = self.events[-1].seq if self.events else 0
        self.attempt = int(stored.meta.get("attempt", 0))
        self.restored_step = int(stored.meta.get("restored_step", 0))
        self.pruned_step = int(stored.meta.get("pruned_step", 0))
        """Responses of steps 2 to this one are gone."""
        self.chain = ChainEpoch.model_validate_json(stored.meta.get("chain", '{"epoch": 0, "members": []}'))
        self.started_wall_s = float(stored.meta.get("started_wall_s", clock.wall_s()))
        first = stored.meta.get("first_lease_wall_s")
        self.first_lease_wall_s = float(first) if first else None
        self.conditions: dict[str, str] = {}
        self.failed_reason = ""
        self.stop_reason: str | None = None
        self.taken_step = 0
        """The batch that the present attempt has taken and not committed; 0: none."""
        self.news = News(Signal(), Signal(), Signal(), Signal())
        self.on_store_failure: Callable[[BaseException], None] = _raise
        self._plans = prompts.plans(identity.job)
        self._rounds_done = {point for point, round_ in self.rounds.items() if round_.done}
        self._ops: list[Op] = []
        self._commands: list[tuple[str, Command]] = []
        self._last: asyncio.Future[None] | None = None
        self._phase = PoolPhase.STARTING
        if "started_wall_s" not in stored.meta:
            self.write(rows.meta("started_wall_s", self.started_wall_s))
            self.write(*rows.totals(self.ledger.counters, self.ledger.stream_position, self.ledger.committed_step))
            if prompts.skipped:
                skipped = ", ".join(f"{number} {reason}" for reason, number in sorted(prompts.skipped.items()))
                self.event("data", f"prompts left out: {skipped}")
        self.advance()

    # --- where the job stands -----------------------------------------------------------------------------------

    @property
    def phase(self) -> PoolPhase:
        return self._phase

    @property
    def durable_step(self) -> int | None:
        """Step of the newest registered checkpoint."""
        return self.checkpoints.kept[-1].step if self.checkpoints.kept else None

    @property
    def num_relays(self) -> int:
        """Relays that a publication can reach."""
        return len(self.chain.members) or len([m for m in self.members.of_role(Role.RELAY) if not m.suspect]) or 1

    @property
    def master(self) -> str:
        return self.chain.members[0].address if self.chain.members else ""

    @property
    def round(self) -> EvaluationRound | None:
        """The evaluation that everything waits for now."""
        match self._phase:
            case PoolPhase.EVALUATING_FIRST:
                return self.rounds[EvalPoint.FIRST]
            case PoolPhase.EVALUATING_LAST:
                return self.rounds[EvalPoint.LAST]
            case _:
                return None

    def round_done(self, point: EvalPoint) -> bool:
        return not self._plans or point in self._rounds_done

    def head(self, step: int) -> VersionRow | None:
        """The version that step `step` + 1 starts from: the newest one at or below `step` on the present lineage."""
        newest = next(iter(reversed(self.register.rows())), None)
        row = newest
        while row is not None and row.step > step:
            row = self.register.row(row.parent) if row.parent is not None else None
        return row

    def advance(self) -> None:
        """Where the job stands now; starts the evaluation that is due."""
        phase = self._next_phase()
        newest = self.register.newest
        if newest is not None and phase in (PoolPhase.EVALUATING_FIRST, PoolPhase.EVALUATING_LAST):
            point = EvalPoint.FIRST if phase is PoolPhase.EVALUATING_FIRST else EvalPoint.LAST
            if point not in self.rounds or self.rounds[point].version != newest.version:
                self.restart_round(point, newest.version)
        if phase is not self._phase:
            before, self._phase = self._phase, phase
            self.event("phase", f"{before.value} -> {phase.value}")
            self.news.leases.notify()
            self.news.batches.notify()
            self.news.members.notify()

    def _next_phase(self) -> PoolPhase:
        if self.failed_reason:
            return PoolPhase.FAILED
        newest, ledger = self.register.newest, self.ledger
        ended = ledger.finished and newest is not None and newest.step >= ledger.plan.steps
        if ended and self.round_done(EvalPoint.LAST) and (self.durable_step or 0) >= ledger.plan.steps:
            return PoolPhase.COMPLETE
        if self.stop_reason is not None and not self.taken_step and (self.durable_step or 0) >= ledger.committed_step:
            return PoolPhase.STOPPED
        if newest is None:
            return PoolPhase.STARTING
        if newest.step == 0 and not self.round_done(EvalPoint.FIRST):
            return PoolPhase.EVALUATING_FIRST
        if ended and not self.round_done(EvalPoint.LAST):
            return PoolPhase.EVALUATING_LAST
        return PoolPhase.TRAINING

    def restart_round(self, point: EvalPoint, version: int) -> None:
        """Nothing that was said of an earlier version counts; terms go on from there."""
        old = self.rounds.get(point)
        samples = [
            EvalSample(key, term=old.samples[key].term + 1 if old and key in old.samples else 0)
            for plan in self._plans
            for key in plan.keys(point)
        ]
        self.rounds[point] = EvaluationRound.restore(point, version, samples)
        self._rounds_done.discard(point)
        self._ops.append(rows.round_(self.rounds[point]))
        self._ops.extend(rows.eval_sample(sample) for sample in samples)

    # --- writing ------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Raises a 503 while nothing can be written, so that what waits for the disk stays bounded."""
        if self.store.condition is not None:
            raise Refusal(503, *self.store.condition)

    def event(self, kind: str, text: str) -> None:
        """Something people want to know."""
        self.event_seq += 1
        event = Event(seq=self.event_seq, wall_s=self.clock.wall_s(), kind=kind, text=text)
        self.events.append(event)
        self._ops.append(rows.event(event))
        if self.event_seq % 500 == 0:
            self._ops.append(rows.DeleteBelow("events", self.event_seq - EVENTS_STORED))
        log.info(text, extra=fields(event=kind))

    def write(self, *ops: Op) -> None:
        """Rows that no state machine names; they go with the next commit."""
        self._ops.extend(ops)

    def command(self, slot: str, command: Command) -> None:
        """Leaves once the next commit is durable."""
        self._commands.append((slot, command))

    def submit(self) -> asyncio.Future[None] | None:
        """Everything decided so far goes to the store, in order. Done when durable; None: it is so already."""
        ops, commands = self._collect(), self._commands
        self._commands = []
        if ops or commands:
            self._last = self.store.submit(ops)
            self._last.add_done_callback(lambda future: self._written(future, commands))
        return self._last if self._last and not self._last.done() else None

    async def commit(self) -> None:
        """Returns when everything decided so far is durable. Raises a 503 Refusal after COMMIT_LIMIT_S."""
        written = self.submit()
        if written is None:
            return
        await asyncio.wait((written,), timeout=COMMIT_LIMIT_S)
        if not written.done():
            raise Refusal(503, *(self.store.condition or STORE_BUSY))
        written.result()

    def _written(self, future: asyncio.Future[None], commands: Iterable[tuple[str, Command]]) -> None:
        error = future.exception()
        if error is not None:
            self.on_store_failure(error)
            return
        for slot, command in commands:
            member = self.members.get(slot)
            if member is not None and member.stream is not None:
                member.stream.send(command)

    def _collect(self) -> list[Op]:
        changes = self.ledger.drain()
        self._note_rounds()
        if self.register.dirty:
            self.news.versions.notify()
            self.news.leases.notify()
        versions = [rows.version(self.register.row(version)) for version in sorted(self.register.dirty)]
        self.register.dirty.clear()
        self.advance()
        ops = [*versions, *self._ledger_ops(changes), *self._ops]
        self._ops = []
        return ops

    def _ledger_ops(self, changes: Changes) -> list[Op]:
        if not changes:
            return []
        if changes.groups or changes.cleared:
            self.news.leases.notify()
            self.news.batches.notify()
        ops: list[Op] = [rows.cleared(key) for key in changes.cleared]
        ops += [rows.segment(*item) for item in changes.appended]
        ops += [self._group(group) for group in changes.groups]
        for sample in changes.samples:
            ops += rows.sample(sample)
        ops += rows.totals(self.ledger.counters, self.ledger.stream_position, self.ledger.committed_step)
        return ops

    def _group(self, group: Group) -> Op:
        prompt = self.prompts.train[group.key.prompt]
        return rows.group(group, prompt.text, prompt.answer)

    def _note_rounds(self) -> None:
        for point, round_ in self.rounds.items():
            if not round_.dirty:
                continue
            self._ops.extend(rows.eval_sample(sample) for sample in round_.dirty.values())
            round_.dirty.clear()
            self.news.leases.notify()
            if round_.done and point not in self._rounds_done:
                self._rounds_done.add(point)
                self.event("evaluated", f"evaluation at version {round_.version} is done")

    # --- rows of the trainer's side -----------------------------------------------------------------------------

    def write_batch(self, batch: SealedBatch) -> None:
        self.write(rows.batch(batch, self.clock.wall_s()))

    def write_step(self, row: StepRow) -> None:
        self.steps.add(row, self.checkpoints.prunable_step)
        self.write(rows.step(row))

    def forget_steps_after(self, step: int) -> None:
        self.steps.forget_after(step)
        self.write(rows.DeleteAbove("steps", step))

    def write_checkpoints(self, removable: Iterable[CheckpointRow]) -> None:
        """The register as it is now; those in `removable` may be deleted by the trainer."""
        kept = {row.path for row in self.checkpoints.kept}
        gone = {row.path: row for row in [*self.removable, *removable] if row.path not in kept}
        self.removable = list(gone.values())[-64:]  # the trainer deletes them at once; older ones were told before
        self.write(*(rows.checkpoint(row, REMOVABLE) for row in gone.values()))
        self.write(*(rows.checkpoint(row, KEPT) for row in self.checkpoints.kept))


def _plan(job: LaminarJob, prompts: PromptBook) -> LedgerPlan:
    spec = job.spec
    return LedgerPlan(
        steps=spec.steps,
        prompts_per_step=spec.algorithm.prompts_per_step,
        samples_per_prompt=spec.algorithm.samples_per_prompt,
        groups_per_lease=spec.prompts_per_lease,
        max_ahead_steps=spec.schedule.max_ahead_steps,
        num_prompts=len(prompts.train),
        seed=spec.data.seed,
        max_response_tokens=spec.sampling.max_response_tokens,
        too_long=prompts.too_long,
    )


def _raise(error: BaseException) -> None:
    raise error
