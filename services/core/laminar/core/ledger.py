"""The sample ledger: what was started, who may write it, and how each sample ended.

The pool drives it: the ledger decides and changes its objects, the store writes the rows named in `drain()`, then
the answer goes out. It holds what has not ended (and batches not yet consumed); what has ended lives in the store.

Invariants, kept under every order of calls:
  * admitted = consumed + discarded + open;
  * only the holder of a sample's current term writes it, and a partial never shrinks within its terms;
  * a sample's version is bound at the grant and changes only by a counted restart;
  * a sealed batch never changes, and no sample is in two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from laminar.core.decisions import (
    Changes,
    Counters,
    Grant,
    LeaseDecision,
    LedgerPlan,
    Moved,
    Outcome,
    Refresh,
    StepConflict,
    Wait,
    WriteResult,
)
from laminar.core.identity import GroupKey, SampleKey, Version
from laminar.core.prompts import PromptStream, StreamPosition
from laminar.core.redirect import Destination, Lost, plan_redirect
from laminar.core.samples import (
    RUNNING,
    DiscardReason,
    Group,
    GroupState,
    Holder,
    Sample,
    SampleEvent,
    SampleState,
    SealedBatch,
)
from laminar.core.schedule import Schedule, ScheduleView
from laminar.core.versions import VersionRegister

__all__ = [
    "MAX_GENERATION_FAILURES",
    "Changes",
    "Counters",
    "Grant",
    "LeaseDecision",
    "Ledger",
    "LedgerPlan",
    "Moved",
    "Outcome",
    "Refresh",
    "StepConflict",
    "Wait",
    "WriteResult",
]

MAX_GENERATION_FAILURES = 3
"""Infrastructure failures after which a sample is given up as `failed`."""


class Ledger:
    """See the module. `register` is shared with the pool; `committed_step` is the last consumed step."""

    def __init__(self, plan: LedgerPlan, schedule: Schedule, register: VersionRegister) -> None:
        self.plan = plan
        self.counters = Counters()
        self.committed_step = 0
        self.groups: dict[GroupKey, Group] = {}
        self.batches: dict[int, SealedBatch] = {}
        self._schedule = schedule
        self._register = register
        self._stream = PromptStream(plan.num_prompts, plan.seed)
        self._ready_seq = 0
        self._dirty_groups: dict[GroupKey, Group] = {}
        self._dirty_samples: dict[SampleKey, Sample] = {}
        self._appended: list[tuple[SampleKey, int, bytes, bytes]] = []
        self._cleared: list[SampleKey] = []

    # --- restoring ----------------------------------------------------------------------------------------------

    @property
    def stream_position(self) -> StreamPosition:
        return self._stream.position

    def restore(
        self,
        groups: Iterable[Group],
        batches: Iterable[SealedBatch],
        counters: Counters,
        position: StreamPosition,
        committed_step: int,
    ) -> None:
        """Continue from stored rows: groups that have not ended, sealed batches not yet consumed, totals."""
        self.groups = {group.key: group for group in groups}
        self.batches = {batch.step: batch for batch in batches}
        self.counters = counters
        self.committed_step = committed_step
        self._stream = PromptStream(self.plan.num_prompts, self.plan.seed, position)
        self._ready_seq = max((group.ready_seq for group in self.groups.values()), default=0)

    def drain(self) -> Changes:
        """What changed since the last call, each row once, in its newest form."""
        changes = Changes(
            list(self._dirty_groups.values()), list(self._dirty_samples.values()), self._appended, self._cleared
        )
        self._dirty_groups, self._dirty_samples, self._appended, self._cleared = {}, {}, [], []
        return changes

    # --- numbers ------------------------------------------------------------------------------------------------

    @property
    def started_unconsumed_groups(self) -> int:
        """Groups that are started and neither consumed nor discarded: what back-pressure counts."""
        return len(self.groups)

    @property
    def num_open(self) -> int:
        """Admitted samples that have not ended."""
        ended = (SampleState.CONSUMED, SampleState.DISCARDED)
        return sum(sample.state not in ended for group in self.groups.values() for sample in group.samples)

    @property
    def finished(self) -> bool:
        return self.committed_step >= self.plan.steps

    def sample(self, key: SampleKey) -> Sample | None:
        """None if it was never admitted, or has ended."""
        group = self.groups.get(key.group)
        return group.samples[key.index] if group and 0 <= key.index < len(group.samples) else None

    def held_by(self, holder: Holder) -> list[Sample]:
        """What this life of a replica may write now."""
        return [s for g in self.groups.values() for s in g.samples if s.holder == holder and s.state in RUNNING]

    def unfinished_versions(self) -> list[int]:
        """Versions that running samples are bound to: those with most of them first, the newer first of equals."""
        counts = Counter(
            sample.version
            for group in self.groups.values()
            for sample in group.samples
            if sample.version is not None and sample.state is SampleState.LEASED
        )
        return sorted(counts, key=lambda version: (-counts[version], -version))

    # --- leases -------------------------------------------------------------------------------------------------

    def lease(self, holder: Holder, version: int | None, now_wall_s: float) -> LeaseDecision:
        """Answer a replica whose batch has ended. A replica that still holds running samples gets those again: the
        earlier answer was lost on the way. A newer visible version comes before any grant."""
        running = [sample for sample in self.held_by(holder) if sample.state is SampleState.LEASED]
        if running and version is not None and all(sample.version == version for sample in running):
            return Grant(version, tuple(running))
        newest = self._register.newest
        if newest is None or self.finished:
            return Wait()
        view = self._view(version)
        if version is None or self._schedule.must_refresh(view):
            return Refresh(newest.version)
        samples = self._take_waiting(holder, version, now_wall_s)
        startable = min(self.plan.groups_per_lease - len({s.key.group for s in samples}), self._startable(view))
        for _ in range(startable):
            samples += self._start_group(holder, version, now_wall_s)
        return Grant(version, tuple(samples)) if samples else Wait()

    def _view(self, version: int | None) -> ScheduleView:
        newest = self._register.newest
        assert newest is not None
        return ScheduleView(
            newest_version=Version(newest.version),
            newest_step=newest.step,
            replica_version=None if version is None else Version(version),
            committed_step=self.committed_step,
            prompts_per_step=self.plan.prompts_per_step,
            max_ahead_steps=self.plan.max_ahead_steps,
            started_unconsumed_groups=self.started_unconsumed_groups,
        )

    def _startable(self, view: ScheduleView) -> int:
        usable = (self.plan.steps - self.committed_step) * self.plan.prompts_per_step - self.started_unconsumed_groups
        return max(0, min(usable, self._schedule.num_startable_groups(view)))

    def _take_waiting(self, holder: Holder, version: int, now_wall_s: float) -> list[Sample]:
        """Samples of started groups come before new ones: restarts, and responses that nobody grades."""
        taken: list[Sample] = []
        waiting = [g for g in self.groups.values() if g.state is GroupState.OPEN]
        for group in sorted(waiting, key=lambda group: group.key):
            free = [s for s in group.samples if s.state is SampleState.PENDING or s.is_orphan]
            if free and len({s.key.group for s in taken} | {group.key}) <= self.plan.groups_per_lease:
                taken += [self._grant(sample, holder, version, now_wall_s) for sample in free]
        return taken

    def _start_group(self, holder: Holder, version: int, now_wall_s: float) -> list[Sample]:
        """Draw prompts until one fits; those over the limit are admitted and discarded at once."""
        for _ in range(self.plan.num_prompts):
            key = self._stream.draw()
            group = Group(key, [Sample(SampleKey(key, index)) for index in range(self.plan.samples_per_prompt)])
            self.groups[key] = group
            self.counters.admitted += len(group.samples)
            self._dirty_groups[key] = group
            if key.prompt not in self.plan.too_long:
                return [self._grant(sample, holder, version, now_wall_s) for sample in group.samples]
            self._discard_group(group, DiscardReason.TOO_LONG, "the prompt is longer than data.maxPromptTokens")
        return []

    def _grant(self, sample: Sample, holder: Holder, version: int, now_wall_s: float) -> Sample:
        sample.move_to(SampleEvent.GRANT)
        sample.term += 1
        sample.holder = holder
        if sample.state is SampleState.LEASED:
            sample.version = version
            sample.leased_wall_s = now_wall_s
        self._dirty_samples[sample.key] = sample
        return sample

    # --- writes of a replica ------------------------------------------------------------------------------------

    def append(
        self, holder: Holder, key: SampleKey, term: int, offset: int, tokens: bytes, logprobs: bytes
    ) -> WriteResult:
        """Tokens [offset, offset + n). What is durable already must be equal; a gap is refused with the durable
        length."""
        sample, refusal = self._writable(holder, key, term)
        if sample is None:
            return refusal
        if len(tokens) != len(logprobs) or len(tokens) % 4 or offset < 0:
            return self._refuse(Outcome.MISMATCH, sample.length)
        if offset > sample.length:
            return self._refuse(Outcome.GAP, sample.length)
        known = min(sample.length - offset, len(tokens) // 4)
        start = 4 * offset
        if bytes(sample.tokens[start : start + 4 * known]) != tokens[: 4 * known]:
            return self._refuse(Outcome.MISMATCH, sample.length)
        new_tokens, new_logprobs = tokens[4 * known :], logprobs[4 * known :]
        if not new_tokens:
            return WriteResult(Outcome.OK, sample.length)
        too_much = sample.length + len(new_tokens) // 4 > self.plan.max_response_tokens
        if sample.state is not SampleState.LEASED or too_much:
            return self._refuse(Outcome.MISMATCH, sample.length)
        self._appended.append((key, sample.length, new_tokens, new_logprobs))
        sample.tokens += new_tokens
        sample.logprobs += new_logprobs
        return WriteResult(Outcome.OK, sample.length)

    def finish(
        self, holder: Holder, key: SampleKey, term: int, length: int, reason: str, detail: str, now_wall_s: float
    ) -> WriteResult:
        """Generation ended. The first valid finish wins; "error" is an infrastructure failure: the sample restarts
        elsewhere, at most MAX_GENERATION_FAILURES times, and is never a reward of 0."""
        sample, refusal = self._writable(holder, key, term)
        if sample is None:
            return refusal
        if sample.state is not SampleState.LEASED:
            return WriteResult(Outcome.OK, sample.length)
        if reason == "error":
            sample.failures += 1
            if sample.failures >= MAX_GENERATION_FAILURES:
                self._discard(sample, DiscardReason.FAILED, detail)
                self._after_end(self.groups[key.group])
            else:
                self._restart(sample)
            return WriteResult(Outcome.OK, 0)
        if length != sample.length:
            return self._refuse(Outcome.GAP, sample.length)
        sample.move_to(SampleEvent.FINISH)
        sample.finish_reason = reason
        sample.finished_wall_s = now_wall_s
        newest = self._register.newest
        assert newest is not None and sample.version is not None
        age = self._register.age(sample.version, newest.version)
        sample.inherent, sample.across_rollback = age.steps, age.across_rollback
        self._dirty_samples[key] = sample
        return WriteResult(Outcome.OK, sample.length)

    def grade(
        self, holder: Holder, key: SampleKey, term: int, reward: float | None, parts: Mapping[str, float], detail: str
    ) -> WriteResult:
        """The verdict; `reward` None: ungraded, left out of the group's statistics."""
        sample, refusal = self._writable(holder, key, term)
        if sample is None:
            return refusal
        if sample.state is not SampleState.FINISHED:
            return self._refuse(Outcome.GAP, sample.length)
        if reward is None:
            self._discard(sample, DiscardReason.UNGRADED, detail)
        else:
            sample.move_to(SampleEvent.GRADE)
            sample.reward, sample.parts, sample.detail = reward, dict(parts), detail
            sample.holder = None
            self._dirty_samples[key] = sample
        self._after_end(self.groups[key.group])
        return WriteResult(Outcome.OK, sample.length)

    def _writable(self, holder: Holder, key: SampleKey, term: int) -> tuple[Sample | None, WriteResult]:
        sample = self.sample(key)
        if sample is None:
            # Never admitted, or ended long ago and gone from memory: either way there is nothing left to write.
            return None, self._refuse(Outcome.SUPERSEDED, 0)
        if sample.term == term and sample.state in (SampleState.GRADED, SampleState.BATCHED):
            return None, WriteResult(Outcome.OK, sample.length)  # a repeated call is answered as the first
        if sample.term != term or sample.holder != holder:
            return None, self._refuse(Outcome.SUPERSEDED, sample.length)
        return sample, WriteResult(Outcome.OK, sample.length)

    def _refuse(self, outcome: Outcome, durable: int) -> WriteResult:
        self.counters.refused[outcome.value] += 1
        return WriteResult(outcome, durable)

    # --- losing a replica ---------------------------------------------------------------------------------------

    def lose(self, source: Holder, destinations: Iterable[Destination], reason: str) -> list[Moved]:
        """A replica is suspect, dead or superseded: each sample it holds gets a new term, elsewhere or nowhere yet."""
        held = {sample.key: sample for sample in self.held_by(source)}
        lost = [_lost(sample) for sample in held.values()]
        others = [destination for destination in destinations if destination.holder != source]
        return [
            self._move(held[redirect.key], source, redirect.to, f"{reason}: {redirect.reason}")
            for redirect in plan_redirect(lost, others)
        ]

    def _move(self, sample: Sample, source: Holder, to: Holder | None, reason: str) -> Moved:
        restarted_tokens = 0
        if to is not None:
            sample.move_to(SampleEvent.MOVE)
            sample.term += 1
            sample.moves += 1
            sample.holder = to
            self.counters.moved_samples += 1
        elif sample.state is SampleState.FINISHED:
            sample.move_to(SampleEvent.ORPHAN)
            sample.term += 1
            sample.holder = None
        else:
            restarted_tokens = sample.length
            self._restart(sample)
        self._dirty_samples[sample.key] = sample
        return Moved(sample, source, to, restarted_tokens, reason)

    def _restart(self, sample: Sample) -> None:
        sample.move_to(SampleEvent.RESTART)
        self.counters.restarted_samples += 1
        self.counters.restarted_tokens += sample.length
        sample.term += 1
        sample.restarts += 1
        sample.holder = None
        sample.version = None
        sample.tokens.clear()
        sample.logprobs.clear()
        self._appended = [item for item in self._appended if item[0] != sample.key]
        self._cleared.append(sample.key)
        self._dirty_samples[sample.key] = sample

    # --- batches ------------------------------------------------------------------------------------------------

    def seal(self, step: int) -> SealedBatch | None:
        """Batch `step`: the same again if it is sealed; else the oldest ready groups, or None while too few are ready.

        Raises StepConflict for a step that is not the next one.
        """
        if step in self.batches:
            return self.batches[step]
        if step != self.committed_step + 1 or step > self.plan.steps:
            raise StepConflict(f"step {step} is not due: {self.committed_step} of {self.plan.steps} are committed")
        ready = sorted(
            (g for g in self.groups.values() if g.state is GroupState.READY), key=lambda group: group.ready_seq
        )
        if len(ready) < self.plan.prompts_per_step:
            return None
        chosen = ready[: self.plan.prompts_per_step]
        for group in chosen:
            group.state, group.step = GroupState.BATCHED, step
            self._dirty_groups[group.key] = group
            for sample in group.graded:
                sample.move_to(SampleEvent.SEAL)
                self._dirty_samples[sample.key] = sample
        self.batches[step] = SealedBatch(step, tuple(group.key for group in chosen))
        return self.batches[step]

    def batch_groups(self, step: int) -> list[Group]:
        """The groups of a sealed, unconsumed batch, in order. Raises StepConflict if there is none."""
        if step not in self.batches:
            raise StepConflict(f"batch {step} is not sealed, or already consumed")
        return [self.groups[key] for key in self.batches[step].groups]

    def commit(self, step: int) -> list[Group]:
        """Batch `step` is consumed; its groups leave memory. An empty list when that was so already.

        Raises StepConflict if it is not the next one or not sealed.
        """
        if step <= self.committed_step:
            return []
        if step != self.committed_step + 1 or step not in self.batches:
            raise StepConflict(f"step {step} is not sealed, or not the next one after step {self.committed_step}")
        groups = self.batch_groups(step)
        for group in groups:
            group.state = GroupState.CONSUMED
            self._dirty_groups[group.key] = group
            for sample in group.graded:
                sample.move_to(SampleEvent.COMMIT)
                self.counters.consumed += 1
                self._dirty_samples[sample.key] = sample
            del self.groups[group.key]
        del self.batches[step]
        self.committed_step = step
        if self.finished:
            self._drop_surplus()
        return groups

    def roll_back(self, restored_step: int, consumed: Iterable[tuple[SealedBatch, list[Group]]]) -> None:
        """A trainer restarts at `restored_step`: the batches after it, which the store gives back, are due again, in
        the same order with the same content."""
        for batch, groups in consumed:
            assert restored_step < batch.step <= self.committed_step, f"batch {batch.step} is not being rolled back"
            self.batches[batch.step] = batch
            for group in groups:
                group.state = GroupState.BATCHED
                self.groups[group.key] = group
                self._dirty_groups[group.key] = group
                for sample in group.samples:
                    if sample.state is SampleState.CONSUMED:
                        sample.move_to(SampleEvent.ROLL_BACK)
                        self.counters.consumed -= 1
                        self._dirty_samples[sample.key] = sample
        self.committed_step = min(self.committed_step, restored_step)

    # --- ends ---------------------------------------------------------------------------------------------------

    def _after_end(self, group: Group) -> None:
        """A sample of `group` has ended: is the group ready, or not worth training on?"""
        if group.state is not GroupState.OPEN or not group.has_ended:
            return
        if len(group.graded) >= group.num_needed:
            self._ready_seq += 1
            group.state, group.ready_seq = GroupState.READY, self._ready_seq
            self._dirty_groups[group.key] = group
            return
        ended = Counter(s.reason for s in group.samples if s.reason is not None)
        self._discard_group(group, ended.most_common(1)[0][0], "too few samples of the group were graded")

    def _discard_group(self, group: Group, reason: DiscardReason, detail: str) -> None:
        for sample in group.samples:
            if sample.state is not SampleState.DISCARDED:
                self._discard(sample, reason, detail)
        group.state = GroupState.DISCARDED
        self._dirty_groups[group.key] = group
        del self.groups[group.key]

    def _discard(self, sample: Sample, reason: DiscardReason, detail: str) -> None:
        sample.move_to(SampleEvent.DISCARD)
        sample.reason, sample.detail, sample.holder = reason, detail, None
        self.counters.discarded[reason.value] += 1
        self._dirty_samples[sample.key] = sample

    def _drop_surplus(self) -> None:
        """The last step is done: what is still open can be used by nobody."""
        for group in list(self.groups.values()):
            self._discard_group(group, DiscardReason.SURPLUS, "the last step was committed")


def _lost(sample: Sample) -> Lost:
    assert sample.version is not None, f"sample {sample.key} is held without a version"
    return Lost(sample.key, sample.version, sample.length, ended=sample.state is SampleState.FINISHED)
