"""The rollout replicas' side of the pool: leases, token streams, and what happens when a replica is lost.

lease  -> evaluation samples, if one is due -> else ledger.lease: refresh | grant | wait
append, finish, grade -> the ledger, or the evaluation that the id names
lost   -> each sample it held moves to a replica of the same version, or starts again; ADOPT and CANCEL follow
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from laminar.core.evaluation import EvalKey, EvalMode, EvalSample, EvaluationRound
from laminar.core.grading import GradingWatch
from laminar.core.identity import SampleKey
from laminar.core.ledger import Grant, LeaseDecision, Moved, Outcome, Refresh, Wait, WriteResult
from laminar.core.prompts import sampling_seed
from laminar.core.redirect import Destination
from laminar.core.samples import Holder, Sample, SampleState
from laminar.pool import rows
from laminar.pool.books import Books
from laminar.pool.members import Member
from laminar.wire.codec import num_items
from laminar.wire.dataplane import (
    AppendItem,
    Command,
    CommandKind,
    FinishItem,
    GradeItem,
    GroupGrant,
    ItemReply,
    LeaseCall,
    LeaseKind,
    LeaseReply,
    ProgressCall,
    ProgressReply,
    SampleGrant,
    Verdict,
)
from laminar.wire.messages import PoolPhase, Role

NEIGHBOURS = 2
"""Relays beside its own that a replica hears of."""
EVAL_LEASES_OF_RUNNING = 2
"""An evaluation lease holds this many times what the engine decodes together: no slot idles, and replicas share."""
MAX_EVAL_FAILURES = 3
"""Infrastructure failures after which an evaluation sample counts as ungraded."""
UNGRADED = "ResponsesUngraded"
_EVAL = "eval/"
_OVER = frozenset({PoolPhase.COMPLETE, PoolPhase.STOPPED, PoolPhase.FAILED})
_VERDICTS = {
    Outcome.OK: Verdict.OK,
    Outcome.SUPERSEDED: Verdict.SUPERSEDED,
    Outcome.GAP: Verdict.GAP,
    Outcome.MISMATCH: Verdict.MISMATCH,
    Outcome.UNKNOWN: Verdict.UNKNOWN,
}


class Rollouts:
    """Decides; the caller commits the books before it answers."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._eval_failures: Counter[EvalKey] = Counter()
        self._grading = GradingWatch()

    # --- leases -------------------------------------------------------------------------------------------------

    def lease(self, call: LeaseCall, member: Member) -> LeaseReply | None:
        """The answer to a replica whose batch has ended; None: nothing to do yet."""
        books = self._books
        member.max_running = call.max_running
        member.version = call.version
        if books.phase in _OVER:
            return LeaseReply(kind=LeaseKind.END)
        round_ = books.round
        if round_ is not None:
            return self._evaluate(round_, call, member)
        held = [sample for sample in books.ledger.held_by(member.holder) if sample.state is SampleState.LEASED]
        if any(sample.version != call.version for sample in held):
            # It asks for work with other weights than those samples are bound to, so it does not run them.
            self.lose(member.holder, f"{member.slot} leases with another version")
            held = []
        if books.stop_reason is not None and not held:
            return None
        decision = books.ledger.lease(member.holder, call.version, books.clock.wall_s())
        return self._reply(decision, member)

    def _reply(self, decision: LeaseDecision, member: Member) -> LeaseReply | None:
        books = self._books
        match decision:
            case Wait():
                return None
            case Refresh(version):
                return self._refresh(version, member)
            case Grant(version, samples):
                member.progress_s = books.clock.monotonic_s()
                if books.first_lease_wall_s is None:
                    books.first_lease_wall_s = books.clock.wall_s()
                    books.write(rows.meta("first_lease_wall_s", books.first_lease_wall_s))
                return LeaseReply(
                    kind=LeaseKind.GRANT, version=version, digest=books.register.row(version).digest,
                    groups=self._grants(samples), temperature=books.spec.sampling.temperature,
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
        samples = round_.lease(member.holder, EVAL_LEASES_OF_RUNNING * call.max_running)
        if not samples:
            return None
        member.progress_s = self._books.clock.monotonic_s()
        by_group: dict[str, list[EvalSample]] = {}
        for sample in samples:
            by_group.setdefault(sample.key.group, []).append(sample)
        return LeaseReply(
            kind=LeaseKind.GRANT, version=round_.version, digest=self._books.register.row(round_.version).digest,
            groups=[self._eval_grant(group, items) for group, items in by_group.items()], temperature=1.0,
        )  # fmt: skip

    def _grants(self, samples: Iterable[Sample]) -> list[GroupGrant]:
        by_group: dict[str, list[Sample]] = {}
        for sample in samples:
            by_group.setdefault(str(sample.key.group), []).append(sample)
        return [self._grant(name, items) for name, items in by_group.items()]

    def _grant(self, name: str, samples: Sequence[Sample]) -> GroupGrant:
        prompt = self._books.prompts.train[samples[0].key.group.prompt]
        seed, budget = self._books.spec.data.seed, self._books.spec.sampling.max_response_tokens
        return GroupGrant(
            group=name, prompt_tokens=prompt.tokens, prompt_text=prompt.text, answer=prompt.answer,
            samples=[
                SampleGrant(
                    id=str(s.key), index=s.key.index, term=s.term, seed=sampling_seed(seed, s.key),
                    max_new_tokens=budget, tokens=bytes(s.tokens), logprobs=bytes(s.logprobs),
                    finish_reason=s.finish_reason if s.state is SampleState.FINISHED else "",
                )
                for s in samples
            ],
        )  # fmt: skip

    def _eval_grant(self, name: str, samples: Sequence[EvalSample]) -> GroupGrant:
        key = samples[0].key
        prompt = self._books.prompts.evaluations[key.name][key.prompt]
        seed, budget = self._books.spec.data.seed, self._books.spec.sampling.max_response_tokens
        return GroupGrant(
            group=name, prompt_tokens=prompt.tokens, prompt_text=prompt.text, answer=prompt.answer,
            samples=[
                SampleGrant(
                    id=str(s.key), index=s.key.index, term=s.term, seed=_eval_seed(seed, s.key),
                    max_new_tokens=budget, greedy=s.key.mode is EvalMode.GREEDY,
                )
                for s in samples
            ],
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
        if item.id.startswith(_EVAL):
            # Evaluation responses are not kept: they start again when their replica is lost.
            owner = self._owner(item.id, item.term, holder)
            verdict = Verdict.OK if owner else Verdict.SUPERSEDED
            return ItemReply(id=item.id, verdict=verdict, durable=item.offset + num_items(item.tokens))
        key = _sample_key(item.id)
        if key is None:
            return ItemReply(id=item.id, verdict=Verdict.UNKNOWN)
        ledger = self._books.ledger
        result = ledger.append(holder, key, item.term, item.offset, item.tokens, item.logprobs)
        if result.outcome is Outcome.MISMATCH:
            # What is durable and what the replica has differ: neither can be trusted, so the sample starts again.
            sample = ledger.sample(key)
            if sample is not None and sample.state is SampleState.LEASED:
                ledger.finish(holder, key, item.term, 0, "error", "tokens differ from those sent before", 0.0)
        return _reply(item.id, result)

    def _finish(self, item: FinishItem, holder: Holder) -> ItemReply:
        if item.id.startswith(_EVAL):
            return self._finish_eval(item, holder)
        key = _sample_key(item.id)
        if key is None:
            return ItemReply(id=item.id, verdict=Verdict.UNKNOWN)
        books = self._books
        now_s = books.clock.wall_s()
        return _reply(
            item.id, books.ledger.finish(holder, key, item.term, item.length, item.reason, item.detail, now_s)
        )

    def _grade(self, item: GradeItem, holder: Holder) -> ItemReply:
        # A reward that is no number would turn a whole group's advantages into none.
        reward = item.reward if item.status == "ok" and math.isfinite(item.reward) else None
        if item.id.startswith(_EVAL):
            owner = self._owner(item.id, item.term, holder)
            done = owner is not None and owner[0].grade(holder, owner[1], item.term, reward)
            if owner is not None and done:
                self._note_grading(owner[0].samples[owner[1]].finish_reason, reward, item.detail)
            return ItemReply(id=item.id, verdict=Verdict.OK if done else Verdict.SUPERSEDED)
        key = _sample_key(item.id)
        if key is None:
            return ItemReply(id=item.id, verdict=Verdict.UNKNOWN)
        ledger = self._books.ledger
        sample = ledger.sample(key)
        was_waiting = sample is not None and sample.state is SampleState.FINISHED
        result = ledger.grade(holder, key, item.term, reward, item.parts, item.detail)
        if sample is not None and was_waiting and result.outcome is Outcome.OK:
            self._note_grading(sample.finish_reason, reward, item.detail)
        return _reply(item.id, result)

    def _note_grading(self, finish_reason: str, reward: float | None, detail: str) -> None:
        """A reward that fails for every response ends the job."""
        if finish_reason == "length":
            return  # worth 0 without a grader
        books, watch = self._books, self._grading
        watch.observe(graded=reward is not None, detail=detail)
        if reward is None:
            books.conditions[UNGRADED] = watch.condition
        warning = watch.take_warning()
        if warning:
            books.event("ungraded", warning)
        if watch.broken and not books.failed_reason:
            books.failed_reason = watch.broken
            books.event("failed", watch.broken)
            books.news.members.notify()

    def _owner(self, id_: str, term: int, holder: Holder) -> tuple[EvaluationRound, EvalKey] | None:
        """The evaluation in which this life of a replica may write this sample now."""
        try:
            key = EvalKey.parse(id_)
        except ValueError:
            return None
        round_ = self._books.rounds.get(key.point)
        return (round_, key) if round_ is not None and round_.owns(holder, key, term) else None

    def _finish_eval(self, item: FinishItem, holder: Holder) -> ItemReply:
        owner = self._owner(item.id, item.term, holder)
        if owner is None:
            return ItemReply(id=item.id, verdict=Verdict.SUPERSEDED)
        round_, key = owner
        if item.reason == "error":
            self._eval_failures[key] += 1
            if self._eval_failures[key] >= MAX_EVAL_FAILURES:
                round_.grade(holder, key, item.term, None)
                return ItemReply(id=item.id, verdict=Verdict.OK)
        round_.finish(holder, key, item.term, item.length, item.reason)
        return ItemReply(id=item.id, verdict=Verdict.OK, durable=item.length)

    # --- losing a replica ---------------------------------------------------------------------------------------

    def lose(self, source: Holder, reason: str) -> None:
        """Nothing that `source` holds is written by it any more."""
        books = self._books
        moved = books.ledger.lose(source, self._destinations(source), reason)
        num_evals = sum(round_.lose(source) for round_ in books.rounds.values())
        if not moved and not num_evals:
            return
        self._cancel(source, moved, reason)
        for destination in sorted({move.to for move in moved if move.to is not None}):
            self._adopt(destination, [move.sample for move in moved if move.to == destination], reason)
        if books.phase not in _OVER:
            # Of a job that has ended nothing goes on anywhere, so nobody needs to hear of it.
            books.event("redirect", _redirect_text(source, moved, num_evals, reason))
        books.news.leases.notify()

    def adopt_unconfirmed(self, holder: Holder) -> None:
        """A replica (re)opened its commands: responses that it should grade may have been lost on the way to it.

        Running ones it gets again with its next lease; grading twice does no harm.
        """
        held = self._books.ledger.held_by(holder)
        self._adopt(holder, [sample for sample in held if sample.state is SampleState.FINISHED], "grading only")

    def _adopt(self, destination: Holder, samples: Sequence[Sample], reason: str) -> None:
        for version in sorted({sample.version for sample in samples if sample.version is not None}):
            groups = self._grants(sample for sample in samples if sample.version == version)
            command = Command(kind=CommandKind.ADOPT, version=version, groups=groups, reason=reason)
            self._books.command(destination.slot, command)

    def _cancel(self, source: Holder, moved: Sequence[Moved], reason: str) -> None:
        """It may still run: it should not waste its time. Every term up to the new one is over."""
        member = self._books.members.get(source.slot)
        if moved and member is not None and member.holder == source:
            ids, terms = [str(m.sample.key) for m in moved], [m.sample.term - 1 for m in moved]
            self._books.command(source.slot, Command(kind=CommandKind.CANCEL, ids=ids, terms=terms, reason=reason))

    def _destinations(self, source: Holder) -> list[Destination]:
        books = self._books
        running: dict[Holder, list[Sample]] = {}
        for group in books.ledger.groups.values():
            for sample in group.samples:
                if sample.holder is not None and sample.state is SampleState.LEASED:
                    running.setdefault(sample.holder, []).append(sample)
        return [
            Destination(
                member.holder,
                held[0].version if (held := running.get(member.holder)) else None,
                max(0, (member.max_running or books.spec.rollout.engine.max_running) - len(held or ())),
            )
            for member in books.members.of_role(Role.ROLLOUT)
            if member.usable and member.holder != source
        ]

    def running_holders(self) -> set[Holder]:
        """Lives of replicas that should be producing tokens now."""
        running = {
            sample.holder
            for group in self._books.ledger.groups.values()
            for sample in group.samples
            if sample.holder is not None and sample.state is SampleState.LEASED
        }
        round_ = self._books.round
        if round_ is not None:
            held = (s for s in round_.samples.values() if s.holder and not s.done and not s.finish_reason)
            running |= {sample.holder for sample in held if sample.holder is not None}
        return running


def _eval_seed(job_seed: int, key: EvalKey) -> int:
    """The same at both points of the run, so that first and last differ by the weights only."""
    text = f"{job_seed}/eval/{key.name}/{key.mode.value}/{key.prompt}/{key.index}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _sample_key(text: str) -> SampleKey | None:
    try:
        return SampleKey.parse(text)
    except ValueError:
        return None


def _reply(id_: str, result: WriteResult) -> ItemReply:
    return ItemReply(id=id_, verdict=_VERDICTS[result.outcome], durable=result.durable)


def _redirect_text(source: Holder, moved: Sequence[Moved], num_evals: int, reason: str) -> str:
    num_redirected = sum(move.to is not None for move in moved)
    num_restarted = len(moved) - num_redirected
    restarted_tokens = sum(move.restarted_tokens for move in moved)
    parts = [f"{num_redirected} trajectories redirected", f"{num_restarted} restarted ({restarted_tokens} tokens)"]
    if num_evals:
        parts.append(f"{num_evals} evaluation samples restarted")
    return f"{source.slot} lost its work ({reason}): {', '.join(parts)}"
