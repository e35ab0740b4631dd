"""Groups that have ended become batches: ready, or dropped; sealed once; consumed, or due again after a recovery.

open --all its samples have ended--> ready --seal--> batched --commit--> consumed
           \\--too few graded, or equal rewards under dynamic sampling--> discarded
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from laminar.core.accounts import Accounts
from laminar.core.decisions import StepConflict
from laminar.core.samples import DiscardReason, Group, GroupState, SampleEvent, SealedBatch


class Batches:
    """Invariant: a sealed batch never changes, and no sample is in two."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def settle(self, group: Group) -> None:
        """A sample of `group` has ended: is the group ready, or not worth training on?"""
        accounts = self._accounts
        if group.state is not GroupState.OPEN or not group.has_ended:
            return
        if len(group.graded) < group.num_needed:
            ended = Counter(s.reason for s in group.samples if s.reason is not None)
            detail = "too few samples of the group were graded"
            accounts.discard_group(group, ended.most_common(1)[0][0], detail)
        elif self._is_filtered(group):
            accounts.counters.filtered_groups += 1
            accounts.counters.refilled_groups += 1
            accounts.discard_group(group, DiscardReason.FILTERED, "all graded samples of the group have equal rewards")
        else:
            accounts.make_ready(group)

    def _is_filtered(self, group: Group) -> bool:
        """Dynamic sampling: another prompt takes its place, up to a number of times a step. Beyond it such groups are
        kept, so that a task on which all answers are alike goes on (its groups stay out of the loss) and ends."""
        limit = self._accounts.plan.max_refill_groups
        if limit is None or self._accounts.counters.refilled_groups >= limit:
            return False
        return group.has_equal_rewards

    def seal(self, step: int) -> SealedBatch | None:
        """Batch `step`: the same again if it is sealed; else the oldest ready groups, or None while too few are ready.

        Raises StepConflict for a step that is not the next one.
        """
        accounts = self._accounts
        if step in accounts.batches:
            return accounts.batches[step]
        committed, plan = accounts.committed_step, accounts.plan
        if step != committed + 1 or step > plan.steps:
            raise StepConflict(f"step {step} is not due: {committed} of {plan.steps} are committed")
        ready = sorted(
            (g for g in accounts.groups.values() if g.state is GroupState.READY), key=lambda group: group.ready_seq
        )
        if len(ready) < plan.prompts_per_step:
            return None
        chosen = ready[: plan.prompts_per_step]
        for group in chosen:
            group.state, group.step = GroupState.BATCHED, step
            self._move(group, SampleEvent.SEAL)
        accounts.counters.refilled_groups = 0
        accounts.batches[step] = SealedBatch(step, tuple(group.key for group in chosen))
        return accounts.batches[step]

    def groups_of(self, step: int) -> list[Group]:
        """The groups of a sealed, unconsumed batch, in order. Raises StepConflict if there is none."""
        if step not in self._accounts.batches:
            raise StepConflict(f"batch {step} is not sealed, or already consumed")
        return [self._accounts.groups[key] for key in self._accounts.batches[step].groups]

    def commit(self, step: int) -> list[Group]:
        """Batch `step` is consumed; its groups leave memory. An empty list when that was so already.

        Raises StepConflict if it is not the next one or not sealed.
        """
        accounts = self._accounts
        if step <= accounts.committed_step:
            return []
        if step != accounts.committed_step + 1 or step not in accounts.batches:
            raise StepConflict(f"step {step} is not sealed, or not the next one after step {accounts.committed_step}")
        groups = self.groups_of(step)
        for group in groups:
            group.state = GroupState.CONSUMED
            accounts.counters.consumed += len(group.graded)
            self._move(group, SampleEvent.COMMIT)
            del accounts.groups[group.key]
        del accounts.batches[step]
        accounts.committed_step = step
        if step >= accounts.plan.steps:
            self._drop_surplus()
        return groups

    def roll_back(self, restored_step: int, consumed: Iterable[tuple[SealedBatch, list[Group]]]) -> None:
        """A trainer restarts at `restored_step`: the batches after it, which the store gives back, are due again, in
        the same order with the same content."""
        accounts = self._accounts
        for batch, groups in consumed:
            assert restored_step < batch.step <= accounts.committed_step, f"batch {batch.step} is not being rolled back"
            accounts.batches[batch.step] = batch
            for group in groups:
                group.state = GroupState.BATCHED
                accounts.groups[group.key] = group
                accounts.counters.consumed -= len(group.graded)
                self._move(group, SampleEvent.ROLL_BACK)
        accounts.committed_step = min(accounts.committed_step, restored_step)

    def _move(self, group: Group, event: SampleEvent) -> None:
        for sample in group.graded:
            sample.move_to(event)
            self._accounts.touch(sample)
        self._accounts.touch_group(group)

    def _drop_surplus(self) -> None:
        """The last step is done: what is still open can be used by nobody."""
        for group in list(self._accounts.groups.values()):
            self._accounts.discard_group(group, DiscardReason.SURPLUS, "the last step was committed")
