"""The sample ledger: the table of moves, leases, writes, losses, batches and rollbacks, one rule a test."""

from __future__ import annotations

from copy import deepcopy

import pytest

from laminar.core.decisions import Grant, LedgerPlan, Outcome, Refresh, StepConflict, Wait
from laminar.core.identity import GroupKey, SampleKey
from laminar.core.ledger import Ledger
from laminar.core.redirect import Destination
from laminar.core.samples import (
    TERMINAL,
    TRANSITIONS,
    DiscardReason,
    GroupState,
    Holder,
    IllegalTransition,
    Sample,
    SampleEvent,
    SampleState,
)
from laminar.core.schedule import make_schedule
from laminar.core.versions import VersionRegister
from laminar.wire.codec import pack_logprobs, pack_tokens

A, B = Holder("rollout-0", 1), Holder("rollout-1", 2)
TOKENS, LOGPROBS = pack_tokens([5, 6, 7]), pack_logprobs([-0.1, -0.2, -0.3])


def make_ledger(
    schedule: str = "laminar", known: VersionRegister | None = None, **changes: int | frozenset[int]
) -> tuple[Ledger, VersionRegister]:
    numbers: dict[str, int | frozenset[int]] = dict(
        steps=3, prompts_per_step=2, samples_per_prompt=4, groups_per_lease=1, max_ahead_steps=2,
        num_prompts=10, seed=0, max_response_tokens=8,
    )  # fmt: skip
    register = known or VersionRegister()
    plan = LedgerPlan(**{**numbers, **changes})  # type: ignore[arg-type]
    return Ledger(plan, make_schedule(schedule), register), register


def publish(register: VersionRegister, step: int, parent: int | None = None, attempt: int = 1) -> int:
    version = register.reserve(attempt, step, parent).version
    register.report_complete(version, f"digest-{version}", "relay-0", 1)
    return version


def lease(ledger: Ledger, holder: Holder, version: int | None) -> list[Sample]:
    decision = ledger.lease(holder, version, 0.0)
    assert isinstance(decision, Grant), decision
    return list(decision.samples)


def write_out(ledger: Ledger, holder: Holder, samples: list[Sample], rewards: list[float | None]) -> None:
    for sample, reward in zip(samples, rewards, strict=True):
        assert ledger.writes.append(holder, sample.key, sample.term, 0, TOKENS, LOGPROBS).outcome is Outcome.OK
        assert ledger.writes.finish(holder, sample.key, sample.term, 3, "stop", "", 0.0).outcome is Outcome.OK
        assert ledger.writes.grade(holder, sample.key, sample.term, reward, {}, "").outcome is Outcome.OK


def ready_group(ledger: Ledger, holder: Holder, version: int) -> GroupKey:
    samples = lease(ledger, holder, version)
    write_out(ledger, holder, samples, [1.0, 0.0, 0.0, 1.0])
    return samples[0].key.group


def consume_step(ledger: Ledger, register: VersionRegister, step: int, version: int) -> int:
    """Two groups, one batch, one commit, and the version that follows."""
    while ledger.seal(step) is None:
        ready_group(ledger, A, version)
    ledger.commit(step)
    return publish(register, step, version)


def balance(ledger: Ledger) -> int:
    counters = ledger.counters
    return counters.admitted - counters.consumed - sum(counters.discarded.values()) - ledger.num_open


def test_every_state_and_event_outside_the_table_is_refused() -> None:
    for state in SampleState:
        for event in SampleEvent:
            sample = Sample(SampleKey(GroupKey(0, 0), 0), state=state)
            if (state, event) in TRANSITIONS:
                sample.move_to(event)
                assert sample.state is TRANSITIONS[state, event]
            else:
                with pytest.raises(IllegalTransition):
                    sample.move_to(event)


def test_a_terminal_state_is_left_only_by_a_rollback() -> None:
    leaving = {(state, event) for state, event in TRANSITIONS if state in TERMINAL}
    assert leaving == {(SampleState.CONSUMED, SampleEvent.ROLL_BACK)}


def test_nothing_is_granted_before_a_version_is_visible() -> None:
    ledger, register = make_ledger()
    assert ledger.lease(A, None, 0.0) == Wait()
    register.reserve(1, 0, None)
    assert ledger.lease(A, None, 0.0) == Wait()


def test_a_newer_visible_version_comes_before_any_grant() -> None:
    ledger, register = make_ledger()
    v0 = publish(register, 0)
    assert ledger.lease(A, None, 0.0) == Refresh(v0)
    assert len(lease(ledger, A, v0)) == 4
    v1 = publish(register, 1, v0)
    assert ledger.lease(B, v0, 0.0) == Refresh(v1)


def test_a_lost_lease_answer_is_given_again_even_when_a_newer_version_is_visible() -> None:
    ledger, register = make_ledger()
    v0 = publish(register, 0)
    first = [(s.key, s.term) for s in lease(ledger, A, v0)]
    publish(register, 1, v0)
    assert [(s.key, s.term) for s in lease(ledger, A, v0)] == first


def test_a_group_is_granted_whole_to_one_replica() -> None:
    ledger, register = make_ledger()
    samples = lease(ledger, A, publish(register, 0))
    assert len({s.key.group for s in samples}) == 1
    assert [s.key.index for s in samples] == [0, 1, 2, 3]
    assert {s.holder for s in samples} == {A}


def test_new_groups_stop_at_the_back_pressure_limit_and_start_again_after_a_step() -> None:
    ledger, register = make_ledger(max_ahead_steps=1)
    v0 = publish(register, 0)
    for _ in range(2):
        ready_group(ledger, A, v0)
    assert ledger.lease(A, v0, 0.0) == Wait()
    ledger.seal(1)
    assert ledger.lease(A, v0, 0.0) == Wait()
    ledger.commit(1)
    assert isinstance(ledger.lease(A, v0, 0.0), Grant)


def test_no_group_starts_that_the_remaining_steps_cannot_use() -> None:
    ledger, register = make_ledger(steps=1, max_ahead_steps=50)
    v0 = publish(register, 0)
    for _ in range(2):
        ready_group(ledger, A, v0)
    assert ledger.lease(A, v0, 0.0) == Wait()


def test_prompts_over_the_limit_are_admitted_and_discarded_as_too_long() -> None:
    ledger, register = make_ledger(num_prompts=2, too_long=frozenset({0}))
    v0 = publish(register, 0)
    for _ in range(2):
        assert ready_group(ledger, A, v0).prompt == 1
    assert ledger.counters.discarded[DiscardReason.TOO_LONG] >= 4
    assert balance(ledger) == 0


@pytest.mark.parametrize(
    ("offset", "tokens", "outcome", "durable"),
    [
        (3, [8], Outcome.OK, 4),
        (1, [6, 7, 8], Outcome.OK, 4),
        (0, [5, 6, 7], Outcome.OK, 3),
        (0, [5], Outcome.OK, 3),
        (4, [8], Outcome.GAP, 3),
        (1, [9, 7, 8], Outcome.MISMATCH, 3),
        (3, [1, 2, 3, 4, 5, 6], Outcome.MISMATCH, 3),
        (-1, [5], Outcome.MISMATCH, 3),
    ],
)
def test_an_append_is_accepted_at_the_durable_length_and_never_shrinks(
    offset: int, tokens: list[int], outcome: Outcome, durable: int
) -> None:
    ledger, register = make_ledger()
    sample = lease(ledger, A, publish(register, 0))[0]
    ledger.writes.append(A, sample.key, sample.term, 0, TOKENS, LOGPROBS)
    logprobs = pack_logprobs([-1.0] * len(tokens))
    result = ledger.writes.append(A, sample.key, sample.term, offset, pack_tokens(tokens), logprobs)
    assert (result.outcome, result.durable) == (outcome, durable)
    assert bytes(sample.tokens).startswith(TOKENS)


def test_a_finish_before_its_last_tokens_is_a_gap() -> None:
    ledger, register = make_ledger()
    sample = lease(ledger, A, publish(register, 0))[0]
    ledger.writes.append(A, sample.key, sample.term, 0, TOKENS, LOGPROBS)
    assert ledger.writes.finish(A, sample.key, sample.term, 4, "stop", "", 0.0).outcome is Outcome.GAP


def test_repeated_calls_are_answered_as_the_first() -> None:
    ledger, register = make_ledger()
    sample = lease(ledger, A, publish(register, 0))[0]
    for _ in range(2):
        assert ledger.writes.append(A, sample.key, sample.term, 0, TOKENS, LOGPROBS).outcome is Outcome.OK
    for _ in range(2):
        assert ledger.writes.finish(A, sample.key, sample.term, 3, "stop", "", 0.0).outcome is Outcome.OK
    for reward in (1.0, 0.5):
        assert ledger.writes.grade(A, sample.key, sample.term, reward, {}, "").outcome is Outcome.OK
    assert (sample.reward, sample.length) == (1.0, 3)


def test_only_the_holder_of_the_current_term_writes() -> None:
    ledger, register = make_ledger()
    sample = lease(ledger, A, publish(register, 0))[0]
    for holder, term in ((B, sample.term), (A, sample.term - 1), (B, 0), (Holder("rollout-0", 0), 1)):
        assert ledger.writes.append(holder, sample.key, term, 0, TOKENS, LOGPROBS).outcome is Outcome.SUPERSEDED
        assert ledger.writes.finish(holder, sample.key, term, 0, "stop", "", 0.0).outcome is Outcome.SUPERSEDED
    assert sample.length == 0
    assert ledger.counters.refused[Outcome.SUPERSEDED] == 8


def test_a_failed_generation_restarts_and_is_given_up_after_three_failures_never_as_a_reward() -> None:
    """Case B4: an infrastructure failure is not an answer worth 0."""
    ledger, register = make_ledger()
    v0 = publish(register, 0)
    sample = lease(ledger, A, v0)[0]
    for failure in range(3):
        held = next(s for s in lease(ledger, A, v0) if s.key == sample.key) if failure else sample
        ledger.writes.finish(A, held.key, held.term, 0, "error", "engine out of memory", 0.0)
        for other in ledger.groups[sample.key.group].samples:
            if other.state is SampleState.LEASED:
                write_out(ledger, A, [other], [1.0])
    assert sample.state is SampleState.DISCARDED and sample.reason is DiscardReason.FAILED
    group = ledger.groups[sample.key.group]
    assert group.state is GroupState.READY and len(group.graded) == 3


def test_an_ungraded_sample_is_left_out_of_its_group() -> None:
    """Case D1: statistics count graded samples only; two of four are enough."""
    ledger, register = make_ledger()
    samples = lease(ledger, A, publish(register, 0))
    write_out(ledger, A, samples, [1.0, None, None, 0.0])
    group = ledger.groups[samples[0].key.group]
    assert group.state is GroupState.READY
    assert [s.key.index for s in group.graded] == [0, 3]


def test_a_group_with_too_few_graded_samples_is_discarded_and_another_prompt_drawn() -> None:
    ledger, register = make_ledger(max_ahead_steps=1)
    v0 = publish(register, 0)
    samples = lease(ledger, A, v0)
    write_out(ledger, A, samples, [1.0, None, None, None])
    assert ledger.counters.discarded == {DiscardReason.UNGRADED: 4}
    assert samples[0].key.group not in ledger.groups
    assert len(ledger.groups) == 0
    assert len(lease(ledger, A, v0)) == 4


def test_samples_of_a_lost_replica_continue_on_one_with_the_same_version() -> None:
    ledger, register = make_ledger()
    v0 = publish(register, 0)
    sample = lease(ledger, A, v0)[0]
    lease(ledger, B, v0)
    ledger.writes.append(A, sample.key, sample.term, 0, TOKENS, LOGPROBS)
    old_term = sample.term
    moved = ledger.lose(A, [Destination(B, v0, 10)], "rollout-0 lost")
    assert {m.to for m in moved} == {B} and len(moved) == 4
    assert (sample.length, sample.version, sample.term) == (3, v0, old_term + 1)
    assert ledger.writes.append(A, sample.key, old_term, 3, TOKENS, LOGPROBS).outcome is Outcome.SUPERSEDED
    assert ledger.writes.append(B, sample.key, sample.term, 3, TOKENS, LOGPROBS).outcome is Outcome.OK


def test_samples_without_a_replica_of_their_version_restart_and_are_counted() -> None:
    ledger, register = make_ledger()
    v0 = publish(register, 0)
    sample = lease(ledger, A, v0)[0]
    ledger.writes.append(A, sample.key, sample.term, 0, TOKENS, LOGPROBS)
    v1 = publish(register, 1, v0)
    ledger.lose(A, [Destination(B, v1, 10)], "rollout-0 lost")
    assert (sample.state, sample.length, sample.version) == (SampleState.PENDING, 0, None)
    assert (ledger.counters.restarted_samples, ledger.counters.restarted_tokens) == (4, 3)
    again = lease(ledger, B, v1)
    assert sample in again and sample.version == v1
    assert sample.key in ledger.drain().cleared


def test_a_finished_response_outlives_its_grader() -> None:
    ledger, register = make_ledger()
    v0 = publish(register, 0)
    sample = lease(ledger, A, v0)[0]
    ledger.writes.append(A, sample.key, sample.term, 0, TOKENS, LOGPROBS)
    ledger.writes.finish(A, sample.key, sample.term, 3, "stop", "", 0.0)
    ledger.lose(A, [], "rollout-0 lost")
    v1 = publish(register, 1, v0)
    assert sample not in lease(ledger, B, v1), "an answer may be lost"
    assert ledger.adopt_ungraded(B) == [sample]
    assert (sample.state, sample.version, sample.length) == (SampleState.FINISHED, v0, 3)
    assert ledger.adopt_ungraded(A) == []
    assert ledger.writes.grade(B, sample.key, sample.term, 1.0, {}, "").outcome is Outcome.OK


def test_restarted_samples_are_granted_before_new_groups_start() -> None:
    ledger, register = make_ledger(groups_per_lease=2)
    v0 = publish(register, 0)
    first = {s.key.group for s in lease(ledger, A, v0)}
    ledger.lose(A, [], "lost")
    assert {s.key.group for s in lease(ledger, B, v0)} == first


def test_a_batch_is_sealed_once_from_the_oldest_ready_groups() -> None:
    ledger, register = make_ledger()
    v0 = publish(register, 0)
    first, second = lease(ledger, A, v0), lease(ledger, B, v0)
    write_out(ledger, B, second, [1.0, 0.0, 0.0, 0.0])
    assert ledger.seal(1) is None
    write_out(ledger, A, first, [1.0, 0.0, 0.0, 0.0])
    third = ready_group(ledger, A, v0)
    batch = ledger.seal(1)
    assert batch is not None
    assert batch.groups == (second[0].key.group, first[0].key.group)
    assert ledger.seal(1) is batch
    assert third not in batch.groups


def test_a_step_that_is_not_due_is_refused() -> None:
    ledger, register = make_ledger()
    consume_step(ledger, register, 1, publish(register, 0))
    for step in (1, 3):
        with pytest.raises(StepConflict):
            ledger.seal(step)
    with pytest.raises(StepConflict):
        ledger.commit(2)


def test_a_commit_is_idempotent() -> None:
    ledger, register = make_ledger()
    consume_step(ledger, register, 1, publish(register, 0))
    assert ledger.commit(1) == []
    assert ledger.counters.consumed == 8


def restored(ledger: Ledger, register: VersionRegister, **changes: int) -> Ledger:
    """A second ledger that continues from copies of the first one's rows."""
    copy, _ = make_ledger("laminar", register, **changes)
    groups, batches, counters = deepcopy((list(ledger.groups.values()), list(ledger.batches.values()), ledger.counters))
    copy.restore(groups, batches, counters, ledger.stream_position, ledger.committed_step)
    return copy


def test_leases_open_at_the_last_step_end_as_surplus() -> None:
    started, register = make_ledger(steps=2)
    v0 = publish(register, 0)
    for _ in range(2):
        ready_group(started, A, v0)
    lease(started, B, v0)
    ledger = restored(started, register, steps=1)
    ledger.seal(1)
    ledger.commit(1)
    assert ledger.counters.discarded == {DiscardReason.SURPLUS: 4}
    assert (ledger.num_open, balance(ledger)) == (0, 0)


def test_a_rollback_makes_the_same_batches_due_again() -> None:
    ledger, register = make_ledger()
    v0 = publish(register, 0)
    kept = []
    version = v0
    for step in (1, 2):
        while ledger.seal(step) is None:
            ready_group(ledger, A, version)
        batch = ledger.batches[step]
        kept.append((batch, ledger.commit(step)))
        version = publish(register, step, version)
    ledger.roll_back(0, kept)
    assert ledger.committed_step == 0 and ledger.counters.consumed == 0
    for step, (batch, groups) in enumerate(kept, start=1):
        assert ledger.seal(step) == batch
        assert ledger.batch_groups(step) == groups
        ledger.commit(step)
    assert (ledger.counters.consumed, balance(ledger)) == (16, 0)


def test_synchronous_starts_one_batch_a_version_and_its_age_is_zero() -> None:
    ledger, register = make_ledger("synchronous")
    version = publish(register, 0)
    for step in (1, 2, 3):
        first, second = lease(ledger, A, version), lease(ledger, B, version)
        write_out(ledger, A, first, [1.0, 0.0, 0.0, 0.0])
        assert ledger.lease(A, version, 0.0) == Wait(), "both groups of the batch are started"
        write_out(ledger, B, second, [1.0, 0.0, 0.0, 0.0])
        assert ledger.seal(step) is not None
        ledger.commit(step)
        if step < 3:
            assert ledger.lease(A, version, 0.0) == Wait(), "the weights of this step are not visible yet"
        assert {s.inherent for s in first + second} == {0}
        version = publish(register, step, version)


def test_the_drained_changes_restore_the_same_ledger() -> None:
    ledger, register = make_ledger()
    v0 = publish(register, 0)
    consume_step(ledger, register, 1, v0)
    sample = lease(ledger, A, v0 + 1)[0]
    ledger.writes.append(A, sample.key, sample.term, 0, TOKENS, LOGPROBS)
    copy = restored(ledger, register)
    assert lease(copy, B, v0 + 1)[0].key == lease(ledger, B, v0 + 1)[0].key
    assert balance(copy) == balance(ledger) == 0
