"""A replica is lost: suspect, dead, or gone by its own will. Each sample it held gets a new term, and a fate.

Poison: a sample that was running in two lives when each of them died is set aside instead of travelling on. Which of
the samples that ran together killed an engine cannot be seen, so one death condemns nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from laminar.core.accounts import Accounts
from laminar.core.batches import Batches
from laminar.core.decisions import Fate, Loss, Moved
from laminar.core.identity import SampleKey
from laminar.core.redirect import Destination, Lost, plan_redirect
from laminar.core.samples import DiscardReason, Holder, Sample, SampleEvent, SampleState

MAX_DEATHS = 2
"""Lives that a sample may end before it is set aside (protocols: a poison sample must not travel the fleet)."""


class Losses:
    """Invariant: after `lose`, the life holds nothing."""

    def __init__(self, accounts: Accounts, batches: Batches) -> None:
        self._accounts, self._batches = accounts, batches

    def lose(
        self, source: Holder, destinations: Iterable[Destination], loss: Loss, kept: frozenset[int] | None, reason: str
    ) -> list[Moved]:
        """`kept`: versions that relays hold; None: not known yet."""
        held = {sample.key: sample for sample in self._accounts.held_by(source)}
        poisoned = self._blame(source, held, loss)
        lost = [_lost(sample) for sample in held.values() if sample.state is not SampleState.DISCARDED]
        others = [destination for destination in destinations if destination.holder != source]
        return poisoned + [
            self._move(held[plan.key], source, plan.fate, plan.to, f"{reason}: {plan.reason}")
            for plan in plan_redirect(lost, others, kept)
        ]

    def absolve(self, source: Holder) -> None:
        """This life is heard again: it did not die of what it ran."""
        for sample in self._marked(source):
            if not sample.lost_lives[source]:
                del sample.lost_lives[source]
                self._accounts.touch(sample)

    def _marked(self, source: Holder) -> list[Sample]:
        """Open samples that this life ran when it was lost before."""
        open_samples = (sample for group in self._accounts.groups.values() for sample in group.samples)
        return [sample for sample in open_samples if source in sample.lost_lives]

    def _blame(self, source: Holder, held: dict[SampleKey, Sample], loss: Loss) -> list[Moved]:
        """Who ran with this life when it was lost; those that have ended too many lives are discarded."""
        if loss is Loss.LEFT:
            return []
        dead = loss is Loss.DEAD
        suspects = {sample.key: sample for sample in self._marked(source)} if dead else {}
        suspects |= {key: sample for key, sample in held.items() if sample.state is SampleState.LEASED}
        poisoned: list[Moved] = []
        for _, sample in sorted(suspects.items()):
            if sample.state not in (SampleState.PENDING, SampleState.LEASED):
                continue  # it has been generated since: whatever killed that life, this did not
            sample.lost_lives[source] = dead or sample.lost_lives.get(source, False)
            self._accounts.touch(sample)
            if sum(sample.lost_lives.values()) >= MAX_DEATHS:
                poisoned.append(self._set_aside(sample, source))
        return poisoned

    def _set_aside(self, sample: Sample, source: Holder) -> Moved:
        lives = ", ".join(f"{life.slot}#{life.incarnation}" for life, dead in sample.lost_lives.items() if dead)
        detail = f"{MAX_DEATHS} replicas died while they generated it: {lives}"
        holder, tokens = sample.holder or source, sample.length
        self._accounts.counters.poisoned_samples += 1
        self._accounts.discard(sample, DiscardReason.FAILED, detail)
        self._batches.settle(self._accounts.groups[sample.key.group])
        return Moved(sample, holder, sample.term, Fate.POISONED, None, tokens, detail)

    def _move(self, sample: Sample, source: Holder, fate: Fate, to: Holder | None, reason: str) -> Moved:
        ended_term, restarted_tokens = sample.term, 0
        match fate:
            case Fate.MOVED:
                sample.move_to(SampleEvent.MOVE)
                sample.term += 1
                sample.moves += 1
                self._accounts.counters.moved_samples += 1
                self._accounts.assign(sample, to)
            case Fate.PARKED:
                self._accounts.park(sample)
            case Fate.RESTARTED:
                restarted_tokens = sample.length
                self._accounts.restart(sample)
            case Fate.UNGRADED:
                sample.move_to(SampleEvent.ORPHAN)
                sample.term += 1
                self._accounts.assign(sample, None)
            case Fate.POISONED:
                raise AssertionError("a plan poisons nothing")
            case _:
                assert_never(fate)
        return Moved(sample, source, ended_term, fate, to, restarted_tokens, reason)


def _lost(sample: Sample) -> Lost:
    assert sample.version is not None, f"sample {sample.key} is held without a version"
    return Lost(sample.key, sample.version, sample.length, ended=sample.state is SampleState.FINISHED)
