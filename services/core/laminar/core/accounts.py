"""The ledger's state, and the few moves that every part of it makes: assign, restart, park, discard.

Invariants: a sample is in exactly one of three places while it is open: held by one life, waiting, or in a group that
has it graded; what changed is in `drain()` once, in its newest form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from laminar.core.decisions import Changes, Counters, LedgerPlan
from laminar.core.identity import GroupKey, SampleKey
from laminar.core.prompts import PromptStream, StreamPosition
from laminar.core.samples import (
    TERMINAL,
    DiscardReason,
    Group,
    GroupState,
    Holder,
    Sample,
    SampleEvent,
    SampleState,
    SealedBatch,
)


class Accounts:
    """Shared by the parts of one ledger. It holds what has not ended; what has ended lives in the store."""

    def __init__(self, plan: LedgerPlan) -> None:
        self.plan = plan
        self.counters = Counters()
        self.committed_step = 0
        self.groups: dict[GroupKey, Group] = {}
        self.batches: dict[int, SealedBatch] = {}
        self.stream = PromptStream(plan.num_prompts, plan.seed)
        self.waiting: dict[SampleKey, Sample] = {}
        """Samples that nobody holds and somebody must: pending ones, and responses without a grader."""
        self._held: dict[Holder, dict[SampleKey, Sample]] = {}
        self._ready_seq = 0
        self._dirty_groups: dict[GroupKey, Group] = {}
        self._dirty_samples: dict[SampleKey, Sample] = {}
        self._appended: list[tuple[SampleKey, int, bytes, bytes]] = []
        self._cleared: list[SampleKey] = []

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
        self.stream = PromptStream(self.plan.num_prompts, self.plan.seed, position)
        self._ready_seq = max((group.ready_seq for group in self.groups.values()), default=0)
        self.waiting, self._held = {}, {}
        for group in self.groups.values():
            for sample in group.samples:
                self._place(sample)

    def drain(self) -> Changes:
        """What changed since the last call."""
        changes = Changes(
            list(self._dirty_groups.values()), list(self._dirty_samples.values()), self._appended, self._cleared
        )
        self._dirty_groups, self._dirty_samples, self._appended, self._cleared = {}, {}, [], []
        return changes

    # --- reading ------------------------------------------------------------------------------------------------

    def sample(self, key: SampleKey) -> Sample | None:
        """None if it was never admitted, or has ended with its group."""
        group = self.groups.get(key.group)
        return group.samples[key.index] if group and 0 <= key.index < len(group.samples) else None

    def held_by(self, holder: Holder) -> list[Sample]:
        """What this life of a replica may write now."""
        return list(self._held.get(holder, {}).values())

    def holders(self) -> dict[Holder, list[Sample]]:
        """Every life that holds a sample, with those that it is to generate; the list may be empty."""
        return {
            holder: [sample for sample in held.values() if sample.state is SampleState.LEASED]
            for holder, held in self._held.items()
        }

    def versions_needed(self) -> Counter[int]:
        """How many unfinished responses each version is needed for."""
        leased = (s for held in self._held.values() for s in held.values() if s.state is SampleState.LEASED)
        counts = Counter(sample.version for sample in leased if sample.version is not None)
        counts.update(s.version for s in self.waiting.values() if s.is_parked and s.version is not None)
        return counts

    @property
    def num_open(self) -> int:
        """Admitted samples that have not ended."""
        return sum(sample.state not in TERMINAL for group in self.groups.values() for sample in group.samples)

    # --- moves --------------------------------------------------------------------------------------------------

    def admit_group(self) -> Group:
        """The next prompt's group, all of it waiting."""
        key = self.stream.draw()
        group = Group(key, [Sample(SampleKey(key, index)) for index in range(self.plan.samples_per_prompt)])
        self.groups[key] = group
        self.counters.admitted += len(group.samples)
        self._dirty_groups[key] = group
        for sample in group.samples:
            self.assign(sample, None)
        return group

    def assign(self, sample: Sample, holder: Holder | None) -> None:
        """Whose it is from now on. Call it after the state has changed."""
        if sample.holder is not None:
            held = self._held.get(sample.holder, {})
            held.pop(sample.key, None)
            if not held:
                self._held.pop(sample.holder, None)
        sample.holder = holder
        self._place(sample)
        self._dirty_samples[sample.key] = sample

    def _place(self, sample: Sample) -> None:
        if sample.holder is not None:
            self._held.setdefault(sample.holder, {})[sample.key] = sample
        if sample.holder is None and sample.state in (SampleState.PENDING, SampleState.FINISHED):
            self.waiting[sample.key] = sample
        else:
            self.waiting.pop(sample.key, None)

    def extend(self, sample: Sample, tokens: bytes, logprobs: bytes) -> None:
        """Durable tokens more."""
        self._appended.append((sample.key, sample.length, tokens, logprobs))
        sample.tokens += tokens
        sample.logprobs += logprobs

    def touch(self, sample: Sample) -> None:
        self._dirty_samples[sample.key] = sample

    def touch_group(self, group: Group) -> None:
        self._dirty_groups[group.key] = group

    def park(self, sample: Sample) -> None:
        """It waits, with all that is durable of it, for a replica of its version."""
        sample.move_to(SampleEvent.PARK)
        sample.term += 1
        self.counters.parked_samples += 1
        self.assign(sample, None)

    def restart(self, sample: Sample) -> None:
        """It starts again from its prompt. Counted."""
        sample.move_to(SampleEvent.RESTART)
        self.counters.restarted_samples += 1
        self.counters.restarted_tokens += sample.length
        sample.term += 1
        sample.restarts += 1
        sample.version = None
        sample.tokens.clear()
        sample.logprobs.clear()
        sample.tools.clear()
        self._appended = [item for item in self._appended if item[0] != sample.key]
        self._cleared.append(sample.key)
        self.assign(sample, None)

    def make_ready(self, group: Group) -> None:
        self._ready_seq += 1
        group.state, group.ready_seq = GroupState.READY, self._ready_seq
        self._dirty_groups[group.key] = group

    def discard(self, sample: Sample, reason: DiscardReason, detail: str) -> None:
        sample.move_to(SampleEvent.DISCARD)
        sample.reason, sample.detail = reason, detail
        self.counters.discarded[reason.value] += 1
        self.assign(sample, None)

    def discard_group(self, group: Group, reason: DiscardReason, detail: str) -> None:
        """What has not ended of it ends so."""
        for sample in group.samples:
            if sample.state is not SampleState.DISCARDED:
                self.discard(sample, reason, detail)
        group.state = GroupState.DISCARDED
        self._dirty_groups[group.key] = group
        del self.groups[group.key]
