"""The rollout replicas' side of the pool: leases and token streams.

lease  -> evaluation samples, if one is due -> else ledger.lease: refresh | grant | wait
append, finish, grade -> the ledger, or the evaluation that the id names
"""

from __future__ import annotations

import math
from functools import lru_cache

from laminar.core.decisions import Grant, LeaseDecision, Loss, Outcome, Refresh, Wait, WriteResult
from laminar.core.evaluation import EvaluationRound
from laminar.core.grading import GradingWatch
from laminar.core.identity import SampleKey
from laminar.core.lateness import LeaseTimes, late_text
from laminar.core.samples import Holder, SampleState
from laminar.pool import rows
from laminar.pool.books import Books
from laminar.pool.evaluations import EVAL_PREFIX, Evaluations
from laminar.pool.grants import Grants
from laminar.pool.members import Member
from laminar.pool.redirects import Redirects
from laminar.wire.dataplane import (
    AppendItem,
    FinishItem,
    GradeItem,
    ItemReply,
    LeaseCall,
    LeaseKind,
    LeaseReply,
    ProgressCall,
    ProgressReply,
    SegmentKind,
)
from laminar.wire.messages import PoolPhase, Role

NEIGHBOURS = 2
"""Relays beside its own that a replica hears of."""
UNGRADED = "ResponsesUngraded"
LATE = "LateLeases"
CAPPED = "DynamicSamplingCapped"
_OVER = frozenset({PoolPhase.COMPLETE, PoolPhase.STOPPED, PoolPhase.FAILED})


class Rollouts:
    """Decides; the caller commits the books before it answers."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._grants = Grants(books.spec, books.prompts)
        self._evaluations = Evaluations(books)
        self.redirects = Redirects(books, self._evaluations, self._grants)
        self._grading = GradingWatch()
        self._lease_times = LeaseTimes()

    # --- leases -------------------------------------------------------------------------------------------------

    def lease(self, call: LeaseCall, member: Member) -> LeaseReply | None:
        """The answer to a replica whose batch has ended; None: nothing to do yet."""
        books = self._books
        member.max_running = call.max_running
        member.version = call.version
        if books.phase in _OVER:
            return LeaseReply(kind=LeaseKind.END)
        if member.leaving:
            return None
        round_ = books.round
        if round_ is not None:
            return self._evaluate(round_, call, member)
        held = [sample for sample in books.ledger.held_by(member.holder) if sample.state is SampleState.LEASED]
        if any(sample.version != call.version for sample in held):
            # It asks for work with other weights than those samples are bound to, so it does not run them.
            self.redirects.lose(member.holder, Loss.LEFT, f"{member.slot} leases with another version")
            held = []
        if books.stop_reason is not None and not held:
            return None
        kept = self.redirects.kept_near(member) if self.redirects.kept() is not None else None
        decision = books.ledger.lease(member.holder, call.version, books.clock.wall_s(), kept)
        return self._reply(decision, member)

    def _reply(self, decision: LeaseDecision, member: Member) -> LeaseReply | None:
        books = self._books
        match decision:
            case Wait():
                return None
            case Refresh(version, num_parked):
                if num_parked:
                    books.journal.event(
                        "redirect", f"{member.slot} loads version {version} for {num_parked} trajectories"
                    )
                return self._refresh(version, member)
            case Grant(version, samples):
                member.progress_s = books.clock.monotonic_s()
                if books.first_lease_wall_s is None:
                    books.first_lease_wall_s = books.clock.wall_s()
                    books.journal.write(rows.meta("first_lease_wall_s", books.first_lease_wall_s))
                return LeaseReply(
                    kind=LeaseKind.GRANT, version=version, digest=books.register.row(version).digest,
                    groups=self._grants.of_samples(samples), temperature=books.spec.sampling.temperature,
                )  # fmt: skip

    def _refresh(self, version: int, member: Member) -> LeaseReply:
        digest = self._books.register.row(version).digest
        return LeaseReply(kind=LeaseKind.REFRESH, version=version, digest=digest, relays=self._relays(member))

    def _relays(self, member: Member) -> list[str]:
        """This machine's relay first, then neighbours."""
        relays = [relay for relay in self._books.members.of_role(Role.RELAY) if not relay.suspect]
        relays.sort(key=lambda relay: (relay.register.machine != member.register.machine, relay.slot))
        return [relay.register.data_address for relay in relays[: 1 + NEIGHBOURS]]

    def _evaluate(self, round_: EvaluationRound, call: LeaseCall, member: Member) -> LeaseReply | None:
        if call.version != round_.version:
            return self._refresh(round_.version, member)
        samples = self._evaluations.lease(round_, member.holder, call.max_running)
        if not samples:
            return None
        member.progress_s = self._books.clock.monotonic_s()
        return LeaseReply(
            kind=LeaseKind.GRANT, version=round_.version, digest=self._books.register.row(round_.version).digest,
            groups=self._grants.of_evaluation(samples), temperature=1.0,
        )  # fmt: skip

    # --- writes -------------------------------------------------------------------------------------------------

    def progress(self, call: ProgressCall, member: Member) -> ProgressReply:
        """Appends, then finishes, then grades, each with its own verdict."""
        if call.appends:
            member.progress_s = self._books.clock.monotonic_s()
        return ProgressReply(
            appends=[self._append(item, member.holder) for item in call.appends],
            finishes=[self._finish(item, member.holder) for item in call.finishes],
            grades=[self._grade(item, member.holder) for item in call.grades],
        )

    def _append(self, item: AppendItem, holder: Holder) -> ItemReply:
        if item.id.startswith(EVAL_PREFIX):
            return self._evaluations.append(item, holder)
        key = _sample_key(item.id)
        if key is None:
            return self._unknown(item.id)
        ledger = self._books.ledger
        tool_call = item.call if item.kind is SegmentKind.TOOL else None
        result = ledger.writes.append(holder, key, item.term, item.offset, item.tokens, item.logprobs, tool_call)
        if result.outcome is Outcome.MISMATCH:
            # What is durable and what the replica has differ: neither can be trusted, so the sample starts again.
            sample = ledger.sample(key)
            if sample is not None and sample.state is SampleState.LEASED:
                ledger.writes.finish(holder, key, item.term, 0, "error", "tokens differ from those sent before", 0.0)
        return _reply(item.id, result)

    def _finish(self, item: FinishItem, holder: Holder) -> ItemReply:
        if item.id.startswith(EVAL_PREFIX):
            return self._evaluations.finish(item, holder)
        key = _sample_key(item.id)
        if key is None:
            return self._unknown(item.id)
        books = self._books
        if item.reason == "declined":
            return _reply(item.id, books.ledger.writes.decline(holder, key, item.term))
        sample = books.ledger.sample(key)
        was_running = sample is not None and sample.state is SampleState.LEASED
        now_s = books.clock.wall_s()
        result = books.ledger.writes.finish(holder, key, item.term, item.length, item.reason, item.detail, now_s)
        if sample is not None and was_running and sample.state is SampleState.FINISHED:
            self._lease_times.observe(sample)
        return _reply(item.id, result)

    def _grade(self, item: GradeItem, holder: Holder) -> ItemReply:
        # A reward that is no number would turn a whole group's advantages into none.
        reward = item.reward if item.status == "ok" and math.isfinite(item.reward) else None
        if item.id.startswith(EVAL_PREFIX):
            reply, counted = self._evaluations.grade(item, holder, reward)
            if counted is not None:
                self._note_grading(counted.finish_reason, reward, item.detail)
            return reply
        key = _sample_key(item.id)
        if key is None:
            return self._unknown(item.id)
        ledger = self._books.ledger
        sample = ledger.sample(key)
        was_waiting = sample is not None and sample.state is SampleState.FINISHED
        result = ledger.writes.grade(holder, key, item.term, reward, item.parts, item.detail)
        if sample is not None and was_waiting and result.outcome is Outcome.OK:
            self._note_grading(sample.finish_reason, reward, item.detail)
        return _reply(item.id, result)

    def _unknown(self, id_: str) -> ItemReply:
        self._books.ledger.counters.refused[Outcome.UNKNOWN.value] += 1
        return ItemReply(id=id_, verdict=Outcome.UNKNOWN)

    def _note_grading(self, finish_reason: str, reward: float | None, detail: str) -> None:
        """A reward that fails for every response ends the job."""
        if finish_reason == "length":
            return  # worth 0 without a grader
        books, watch = self._books, self._grading
        watch.observe(graded=reward is not None, detail=detail)
        if reward is None:
            books.conditions[UNGRADED] = watch.condition
        if watch.broken and not books.failed_reason:
            books.failed_reason = watch.broken
            books.journal.event("failed", watch.broken)
            books.news.members.notify()

    # --- the pool's clock -----------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Once a second: what waits for a grader, partials whose version is gone, and what people should know of."""
        self.redirects.grade_orphans()
        self.redirects.restart_unkept()
        books = self._books
        running = [sample for held in books.ledger.running().values() for sample in held]
        late = self._lease_times.late(running, books.clock.wall_s())
        self._show(LATE, late_text(late))
        limit = books.ledger.plan.max_refill_groups
        capped = limit is not None and books.ledger.counters.refilled_groups >= limit
        text = f"{limit} groups of equal rewards were dropped for one step; further ones are kept" if capped else ""
        self._show(CAPPED, text)

    def _show(self, condition: str, text: str) -> None:
        """An event when it begins, the condition while it lasts."""
        conditions = self._books.conditions
        if not text:
            conditions.pop(condition, None)
            return
        if condition not in conditions:
            self._books.journal.event("condition", f"{condition}: {text}")
        conditions[condition] = text

    def running_holders(self) -> set[Holder]:
        """Lives of replicas that should be producing tokens now."""
        running = {holder for holder, held in self._books.ledger.running().items() if held}
        round_ = self._books.round
        if round_ is not None:
            held = (s for s in round_.samples.values() if s.holder and not s.done and not s.finish_reason)
            running |= {sample.holder for sample in held if sample.holder is not None}
        return running


@lru_cache(maxsize=2**15)
def _sample_key(text: str) -> SampleKey | None:
    try:
        return SampleKey.parse(text)
    except ValueError:
        return None


def _reply(id_: str, result: WriteResult) -> ItemReply:
    return ItemReply(id=id_, verdict=result.outcome, durable=result.durable)
