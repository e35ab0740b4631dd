"""Dynamic sampling (DAPO) and late leases, by name."""

from __future__ import annotations

from collections.abc import Sequence

from laminar.core.decisions import Grant, LedgerPlan
from laminar.core.lateness import LATE_AFTER_S, LeaseTimes, late_text
from laminar.core.ledger import Ledger
from laminar.core.samples import DiscardReason, GroupState, Holder, Sample, SampleState
from laminar.core.schedule import SCHEDULES, make_schedule
from laminar.core.versions import VersionRegister

A = Holder("rollout-0", 1)


def started(max_refill_groups: int | None, schedule: str = "laminar") -> Ledger:
    register = VersionRegister()
    plan = LedgerPlan(
        steps=1, prompts_per_step=2, samples_per_prompt=3, groups_per_lease=1, max_ahead_steps=1, num_prompts=50,
        seed=0, max_response_tokens=4, max_refill_groups=max_refill_groups,
    )  # fmt: skip
    register.reserve(1, 0, None)
    register.report_complete(0, "d", "relay-0", 1)
    return Ledger(plan, make_schedule(schedule), register)


def graded_group(ledger: Ledger, rewards: Sequence[float | None]) -> list[Sample]:
    decision = ledger.lease(A, 0, 0.0)
    assert isinstance(decision, Grant), decision
    for sample, reward in zip(decision.samples, rewards, strict=True):
        ledger.writes.finish(A, sample.key, sample.term, 0, "stop", "", 0.0)
        ledger.writes.grade(A, sample.key, sample.term, reward, {}, "")
    return list(decision.samples)


def test_groups_of_equal_rewards_are_dropped_and_their_places_filled_again() -> None:
    for schedule in SCHEDULES:
        ledger = started(10, schedule)
        for rewards in ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.5, None, 0.5]):
            samples = graded_group(ledger, rewards)
            assert {s.state for s in samples} == {SampleState.DISCARDED}
        graded_group(ledger, [1.0, 0.0, None])
        assert ledger.seal(1) is None
        graded_group(ledger, [0.0, 0.0, 1.0])
        assert ledger.seal(1) is not None
        ledger.commit(1)
        assert ledger.counters.discarded == {DiscardReason.FILTERED: 8, DiscardReason.UNGRADED: 2}
        assert (ledger.counters.filtered_groups, ledger.counters.consumed, ledger.num_open) == (3, 5, 0)


def test_without_dynamic_sampling_groups_of_equal_rewards_are_kept() -> None:
    ledger = started(None)
    group = graded_group(ledger, [1.0, 1.0, 1.0])[0].key.group
    assert ledger.groups[group].state is GroupState.READY


def test_the_cap_ends_the_refills_of_a_step_so_that_a_task_of_equal_answers_goes_on() -> None:
    ledger = started(3)
    for _ in range(3 + 2):
        graded_group(ledger, [0.0, 0.0, 0.0])
    assert ledger.counters.filtered_groups == 3
    assert ledger.seal(1) is not None
    assert ledger.counters.refilled_groups == 0, "the next step has its own refills"


def test_leases_that_last_ten_times_the_median_are_named_oldest_first() -> None:
    ledger = started(None)
    decision = ledger.lease(A, 0, 1000.0)
    assert isinstance(decision, Grant)
    first, second, third = decision.samples
    times = LeaseTimes()
    assert times.late([first], 1000.0 + LATE_AFTER_S) == []
    second.leased_wall_s = 900.0
    late = times.late([first, second, third], 1000.5 + LATE_AFTER_S)
    assert [lease.sample for lease in late] == [second, first, third]
    assert late_text(late).startswith(f"3 leases are late: {second.key} on rollout-0 for 160 s (0 tokens of version 0)")
    for _ in range(9):
        third.finished_wall_s = third.leased_wall_s + 50.0
        times.observe(third)
    assert times.limit_s == 500.0, "where responses take long, so do late ones"
    assert late_text([]) == ""
