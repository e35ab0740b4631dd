"""The pool's books: every state machine of one job, and where the job stands by them.

`journal` makes durable what they decide; `trained` is the record of training.
"""

from __future__ import annotations

from dataclasses import dataclass

from laminar.core.decisions import Changes, LedgerPlan
from laminar.core.evaluation import EvalPoint, EvalSample, EvaluationRound
from laminar.core.ledger import Ledger
from laminar.core.samples import Group
from laminar.core.schedule import make_schedule
from laminar.core.versions import VersionRegister, VersionRow
from laminar.pool import rows
from laminar.pool.generation import FIRST_INCARNATION, FIRST_VERSION
from laminar.pool.journal import Journal
from laminar.pool.members import Members
from laminar.pool.prompts import PromptBook
from laminar.pool.restore import Stored
from laminar.pool.rows import Op
from laminar.pool.signals import Clock, Signal
from laminar.pool.store import Store
from laminar.pool.trained import Trained
from laminar.wire.messages import ChainEpoch, PoolPhase, Role
from laminar.wire.spec import LaminarJob


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
    """Invariant: in memory = in the store + what the journal has submitted + what it will submit next."""

    def __init__(self, identity: JobIdentity, prompts: PromptBook, store: Store, stored: Stored, clock: Clock) -> None:
        self.identity, self.spec, self.prompts, self.clock = identity, identity.job.spec, prompts, clock
        first_incarnation = int(stored.meta.get(FIRST_INCARNATION, 1))
        self.members = Members(stored.members, clock.monotonic_s(), first_incarnation)
        self.journal = Journal(store, clock, stored.events, self._collect, self.members.deliver)
        self.trained = Trained(stored, self.spec.trainer.checkpoint.keep, self.journal, clock)
        self.register = VersionRegister(stored.versions, int(stored.meta.get(FIRST_VERSION, 0)))
        self.ledger = Ledger(_plan(identity.job, prompts), make_schedule(self.spec.schedule.type.value), self.register)
        self.ledger.restore(stored.groups, stored.batches, stored.counters, stored.position, stored.committed_step)
        self.rounds = dict(stored.rounds)
        self.chain = ChainEpoch.model_validate_json(stored.meta.get("chain", '{"epoch": 0, "members": []}'))
        first = stored.meta.get("first_lease_wall_s")
        self.first_lease_wall_s = float(first) if first else None
        self.conditions: dict[str, str] = {}
        self.failed_reason = ""
        self.stop_reason: str | None = None
        self.news = News(Signal(), Signal(), Signal(), Signal())
        self._plans = prompts.plans(identity.job)
        self._rounds_done = {point for point, round_ in self.rounds.items() if round_.done}
        self._phase = PoolPhase.STARTING
        if "started_wall_s" not in stored.meta:
            self._begin()
        self.advance()

    def _begin(self) -> None:
        """The first life of the job's first pool."""
        self.journal.write(rows.meta("started_wall_s", self.clock.wall_s()), *self.totals())
        if self.prompts.skipped:
            skipped = ", ".join(f"{number} {reason}" for reason, number in sorted(self.prompts.skipped.items()))
            self.journal.event("data", f"prompts left out: {skipped}")

    # --- where the job stands -----------------------------------------------------------------------------------

    @property
    def phase(self) -> PoolPhase:
        return self._phase

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
            self.journal.event("phase", f"{before.value} -> {phase.value}")
            self.news.leases.notify()
            self.news.batches.notify()
            self.news.members.notify()

    def _next_phase(self) -> PoolPhase:
        if self.failed_reason:
            return PoolPhase.FAILED
        newest, ledger, durable_step = self.register.newest, self.ledger, self.trained.durable_step or 0
        ended = ledger.finished and newest is not None and newest.step >= ledger.plan.steps
        if ended and self.round_done(EvalPoint.LAST) and durable_step >= ledger.plan.steps:
            return PoolPhase.COMPLETE
        if self.stop_reason is not None and not self.trained.taken_step and durable_step >= ledger.committed_step:
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
        self.journal.write(rows.round_(self.rounds[point]), *(rows.eval_sample(sample) for sample in samples))

    # --- writing ------------------------------------------------------------------------------------------------

    def totals(self) -> list[Op]:
        """What is written with every change of the ledger."""
        return [*rows.totals(self.ledger.counters, self.ledger.stream_position, self.ledger.committed_step)]

    def _collect(self) -> list[Op]:
        changes = self.ledger.drain()
        self._note_rounds()
        if self.register.dirty:
            self.news.versions.notify()
            self.news.leases.notify()
        versions = [rows.version(self.register.row(version)) for version in sorted(self.register.dirty)]
        self.register.dirty.clear()
        self.advance()
        return [*versions, *self._ledger_ops(changes)]

    def _ledger_ops(self, changes: Changes) -> list[Op]:
        if not changes:
            return []
        if changes.groups or changes.cleared:
            self.news.leases.notify()
            self.news.batches.notify()
        ops: list[Op] = [rows.cleared(key) for key in changes.cleared]
        if changes.appended:
            ops.append(rows.segments(changes.appended))
        ops += [self._group(group) for group in changes.groups]
        for sample in changes.samples:
            ops += rows.sample(sample)
        return ops + self.totals()

    def _group(self, group: Group) -> Op:
        prompt = self.prompts.train[group.key.prompt]
        return rows.group(group, prompt.text, prompt.answer, self.ledger.committed_step)

    def _note_rounds(self) -> None:
        for point, round_ in self.rounds.items():
            if not round_.dirty:
                continue
            self.journal.write(*(rows.eval_sample(sample) for sample in round_.dirty.values()))
            round_.dirty.clear()
            self.news.leases.notify()
            if round_.done and point not in self._rounds_done:
                self._rounds_done.add(point)
                self.journal.event("evaluated", f"evaluation at version {round_.version} is done")


def _plan(job: LaminarJob, prompts: PromptBook) -> LedgerPlan:
    spec = job.spec
    dynamic = spec.algorithm.dynamic_sampling
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
        max_refill_groups=dynamic.max_refills * spec.algorithm.prompts_per_step if dynamic else None,
    )
