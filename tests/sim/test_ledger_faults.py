"""Random orders of everything that can happen to a ledger, deaths, late messages, recoveries and restarts included.

After each event the promises hold: nothing lost, nothing twice, one version per trajectory, batches immutable.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from laminar.core.decisions import Grant, LedgerPlan, Outcome, Refresh, WriteResult
from laminar.core.identity import SampleKey
from laminar.core.ledger import Ledger
from laminar.core.redirect import Destination
from laminar.core.samples import Group, Holder, SampleState, SealedBatch
from laminar.core.schedule import SCHEDULES, make_schedule
from laminar.core.versions import VersionRegister
from laminar.wire.codec import pack_logprobs, pack_tokens

REPLICAS = 3
PLAN = LedgerPlan(
    steps=4, prompts_per_step=2, samples_per_prompt=3, groups_per_lease=2, max_ahead_steps=2,
    num_prompts=5, seed=0, max_response_tokens=6, too_long=frozenset({4}),
)  # fmt: skip
slots = st.integers(0, REPLICAS - 1)


@dataclass(frozen=True)
class Right:
    """A right to write that was once granted, kept to be used late."""

    holder: Holder
    key: SampleKey
    term: int


class LedgerUnderFaults(RuleBasedStateMachine):
    @initialize(schedule=st.sampled_from(SCHEDULES))
    def begin(self, schedule: str) -> None:
        self.register = VersionRegister()
        self.schedule = make_schedule(schedule)
        self.ledger = Ledger(PLAN, self.schedule, self.register)
        self.incarnations = [1] * REPLICAS
        self.loaded: list[int | None] = [None] * REPLICAS
        self.old_rights: list[Right] = []
        self.bound: dict[tuple[SampleKey, int], int] = {}
        self.sealed: dict[int, SealedBatch] = {}
        self.archive: dict[int, tuple[SealedBatch, list[Group]]] = {}
        self.attempt, self.next_step = 1, 1
        self.head = self.publish(0, None)

    def publish(self, step: int, parent: int | None) -> int:
        version = self.register.reserve(self.attempt, step, parent).version
        self.register.report_complete(version, f"d{version}", "relay-0", 1)
        return version

    def holder(self, slot: int) -> Holder:
        return Holder(f"rollout-{slot}", self.incarnations[slot])

    def destinations(self) -> list[Destination]:
        result: list[Destination] = []
        for slot in range(REPLICAS):
            running = [s for s in self.ledger.held_by(self.holder(slot)) if s.state is SampleState.LEASED]
            result.append(Destination(self.holder(slot), running[0].version if running else None, 4))
        return result

    @rule(slot=slots)
    def lease(self, slot: int) -> None:
        decision = self.ledger.lease(self.holder(slot), self.loaded[slot], 0.0)
        if isinstance(decision, Refresh):
            self.loaded[slot] = decision.version
        if isinstance(decision, Grant):
            for sample in decision.samples:
                assert sample.holder == self.holder(slot)
                self.old_rights.append(Right(self.holder(slot), sample.key, sample.term))

    @rule(slot=slots)
    def adopt_ungraded(self, slot: int) -> None:
        for sample in self.ledger.adopt_ungraded(self.holder(slot)):
            self.old_rights.append(Right(self.holder(slot), sample.key, sample.term))

    @rule(slot=slots, count=st.integers(1, 8), reward=st.sampled_from([0.0, 1.0, None]), error=st.integers(0, 9))
    def work(self, slot: int, count: int, reward: float | None, error: int) -> None:
        for sample in self.ledger.held_by(self.holder(slot))[:count]:
            write = (self.holder(slot), sample.key, sample.term)
            if sample.state is SampleState.LEASED and sample.length == 0:
                self.ledger.writes.append(*write, 0, pack_tokens([1, 2]), pack_logprobs([0.0, 0.0]))
            elif sample.state is SampleState.LEASED:
                reason = "error" if error == 0 else "stop"
                self.ledger.writes.finish(*write, sample.length, reason, "", 0.0)
            else:
                self.ledger.writes.grade(*write, reward, {}, "")

    @precondition(lambda self: self.old_rights)
    @rule(data=st.data())
    def late_message(self, data: st.DataObject) -> None:
        """Whoever's right is superseded changes nothing, whatever it says."""
        right = data.draw(st.sampled_from(self.old_rights))
        sample = self.ledger.sample(right.key)
        current = sample is not None and (sample.holder, sample.term) == (right.holder, right.term)
        before = deepcopy(sample)
        results: list[WriteResult] = [self.ledger.writes.append(right.holder, right.key, right.term, 0, b"", b"")]
        if not current:
            results.append(
                self.ledger.writes.append(right.holder, right.key, right.term, 0, pack_tokens([9]), pack_logprobs([0]))
            )
            results.append(self.ledger.writes.finish(right.holder, right.key, right.term, 0, "error", "", 0.0))
            results.append(self.ledger.writes.grade(right.holder, right.key, right.term, 0.5, {}, ""))
            assert Outcome.GAP not in {result.outcome for result in results}
        assert self.ledger.sample(right.key) == before

    @rule(slot=slots, dies=st.booleans())
    def lose(self, slot: int, dies: bool) -> None:
        """Suspect (the same life comes back later with old terms), or dead (a new incarnation)."""
        self.ledger.lose(self.holder(slot), self.destinations(), "lost")
        assert not self.ledger.held_by(self.holder(slot))
        if dies:
            self.incarnations[slot] += 1
            self.loaded[slot] = None

    @rule()
    def train(self) -> None:
        if self.next_step > PLAN.steps:
            return
        batch = self.ledger.seal(self.next_step)
        if batch is None:
            return
        assert self.sealed.setdefault(batch.step, batch) == batch, "a sealed batch never changes"
        self.archive[batch.step] = (batch, self.ledger.commit(batch.step))
        self.head = self.publish(batch.step, self.head)
        self.next_step = batch.step + 1

    @rule(back=st.integers(0, 3))
    def trainer_recovers(self, back: int) -> None:
        restored = max(0, self.ledger.committed_step - back)
        self.attempt += 1
        self.register.burn_before(self.attempt)
        again = [self.archive.pop(step) for step in sorted(self.archive) if step > restored]
        self.ledger.roll_back(restored, again)
        self.head = self.publish(restored, self.register.version_of_step(restored, self.head))
        self.next_step = restored + 1

    @rule()
    def pool_restarts(self) -> None:
        again = Ledger(PLAN, self.schedule, self.register)
        groups, batches, counters = deepcopy(
            (list(self.ledger.groups.values()), list(self.ledger.batches.values()), self.ledger.counters)
        )
        again.restore(groups, batches, counters, self.ledger.stream_position, self.ledger.committed_step)
        self.ledger = again

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        counters = self.ledger.counters
        consumed = sum(len(group.graded) for _, groups in self.archive.values() for group in groups)
        assert counters.consumed == consumed
        assert counters.admitted == counters.consumed + sum(counters.discarded.values()) + self.ledger.num_open
        if self.ledger.finished:
            assert self.ledger.num_open == 0

    @invariant()
    def no_sample_is_in_two_batches(self) -> None:
        keys = [key for batch, _ in self.archive.values() for key in batch.groups]
        keys += [key for batch in self.ledger.batches.values() for key in batch.groups]
        assert not [key for key, count in Counter(keys).items() if count > 1]

    @invariant()
    def one_version_per_trajectory(self) -> None:
        for group in self.ledger.groups.values():
            for sample in group.samples:
                if sample.version is not None:
                    bound = self.bound.setdefault((sample.key, sample.restarts), sample.version)
                    assert sample.version == bound
                if sample.holder and sample.state is SampleState.LEASED:
                    slot = int(sample.holder.slot[-1])
                    assert sample.holder != self.holder(slot) or sample.version == self.loaded[slot]

    @invariant()
    def back_pressure_holds(self) -> None:
        limit = PLAN.max_ahead_steps * PLAN.prompts_per_step
        replayed = sum(len(batch.groups) for batch in self.ledger.batches.values())
        assert len(self.ledger.groups) <= limit + replayed


TestLedgerUnderFaults = LedgerUnderFaults.TestCase
TestLedgerUnderFaults.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
