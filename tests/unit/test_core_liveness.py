"""Suspect, dead and the brake, by a watcher that is given its clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.core.liveness import Evidence, Role, Sighting, Verdict, Watch, verdict


def sighting(
    slot: str = "rollout-0", *, suspect: bool = False, answers: bool | None = None, exited: bool = False, life: int = 1
) -> Sighting:
    return Sighting(slot, life, suspect=suspect, answers=answers, exited=exited)


@pytest.mark.parametrize(
    ("role", "evidence", "now_s", "expected"),
    [
        (Role.ROLLOUT, Evidence(), 1000.0, Verdict.ALIVE),
        (Role.ROLLOUT, Evidence(exited=True), 0.0, Verdict.DEAD),
        (Role.ROLLOUT, Evidence(suspect_since_s=100.0), 1000.0, Verdict.SUSPECT),
        (Role.ROLLOUT, Evidence(unanswered_since_s=100.0), 1000.0, Verdict.ALIVE),
        (Role.ROLLOUT, Evidence(suspect_since_s=100.0, unanswered_since_s=100.0), 129.9, Verdict.SUSPECT),
        (Role.ROLLOUT, Evidence(suspect_since_s=100.0, unanswered_since_s=100.0), 130.0, Verdict.DEAD),
        (Role.RELAY, Evidence(suspect_since_s=100.0, unanswered_since_s=100.0), 130.0, Verdict.DEAD),
        (Role.RELAY, Evidence(suspect_since_s=100.0, unanswered_since_s=129.0), 130.0, Verdict.SUSPECT),
        (Role.TRAINER, Evidence(suspect_since_s=100.0, unanswered_since_s=100.0), 219.9, Verdict.SUSPECT),
        (Role.TRAINER, Evidence(suspect_since_s=100.0, unanswered_since_s=100.0), 220.0, Verdict.DEAD),
        (
            Role.ROLLOUT,
            Evidence(suspect_since_s=0.0, unanswered_since_s=0.0, watched_since_s=95.0),
            100.0,
            Verdict.SUSPECT,
        ),
        (Role.ROLLOUT, Evidence(stalled=True, watched_since_s=95.0), 100.0, Verdict.ALIVE),
        (Role.ROLLOUT, Evidence(stalled=True), 100.0, Verdict.DEAD),
        (Role.POOL, Evidence(unanswered_since_s=100.0), 129.0, Verdict.SUSPECT),
        (Role.POOL, Evidence(unanswered_since_s=100.0), 130.0, Verdict.DEAD),
    ],
)
def test_a_life_is_judged_by_two_signs_that_agree(
    role: Role, evidence: Evidence, now_s: float, expected: Verdict
) -> None:
    assert verdict(role, evidence, now_s) is expected


def test_a_member_that_is_heard_again_starts_from_nothing() -> None:
    watch = Watch(started_s=0.0)
    watch.observe(1.0, [sighting(suspect=True, answers=False)], pool_reachable=True)
    watch.observe(20.0, [sighting(suspect=False, answers=True)], pool_reachable=True)
    watch.observe(21.0, [sighting(suspect=True, answers=False)], pool_reachable=True)
    assert watch.evidence("rollout-0", 1).suspect_since_s == 21.0
    assert watch.evidence("rollout-0", 1).unanswered_since_s == 21.0


def test_nothing_is_held_against_a_new_life() -> None:
    watch = Watch(started_s=0.0)
    watch.observe(1.0, [sighting(suspect=True, answers=False, life=1)], pool_reachable=True)
    watch.observe(50.0, [sighting(life=2)], pool_reachable=True)
    assert verdict(Role.ROLLOUT, watch.evidence("rollout-0", 2), 50.0) is Verdict.ALIVE


def test_after_the_pool_was_away_silence_is_counted_anew() -> None:
    watch = Watch(started_s=0.0)
    dark = [sighting(suspect=True, answers=False)]
    watch.observe(1.0, dark, pool_reachable=True)
    watch.observe(25.0, dark, pool_reachable=False)
    watch.observe(40.0, dark, pool_reachable=True)
    assert verdict(Role.ROLLOUT, watch.evidence("rollout-0", 1), 69.0) is Verdict.SUSPECT
    assert verdict(Role.ROLLOUT, watch.evidence("rollout-0", 1), 70.0) is Verdict.DEAD


def test_many_members_silent_together_put_the_brake_on_until_it_passes() -> None:
    watch = Watch(started_s=0.0)
    slots = [f"rollout-{i}" for i in range(8)]
    watch.observe(1.0, [sighting(slot) for slot in slots], pool_reachable=True)
    assert watch.brake(1.0) is None
    watch.observe(2.0, [sighting(slot, suspect=True) for slot in slots[:3]], pool_reachable=True)
    brake = watch.brake(2.0)
    assert brake is not None and brake.reason == "many members went silent together"
    watch.observe(9.0, [sighting(slots[0], suspect=True), *map(sighting, slots[1:])], pool_reachable=True)
    assert watch.brake(9.0) is None


def test_members_that_go_silent_one_after_the_other_leave_the_brake_off() -> None:
    watch = Watch(started_s=0.0)
    slots = [f"rollout-{i}" for i in range(5)]
    for turn in range(5):
        dark = [sighting(slot, suspect=index <= turn) for index, slot in enumerate(slots)]
        watch.observe(20.0 * turn, dark, pool_reachable=True)
        assert watch.brake(20.0 * turn) is None


def test_members_that_exited_are_proof_and_not_a_mass_failure() -> None:
    watch = Watch(started_s=0.0)
    watch.observe(1.0, [sighting(f"rollout-{i}", suspect=True, exited=True) for i in range(6)], pool_reachable=True)
    assert watch.brake(1.0) is None


def test_the_brake_gives_up_after_ten_minutes() -> None:
    watch = Watch(started_s=0.0)
    dark = [sighting(f"rollout-{i}", suspect=True) for i in range(6)]
    watch.observe(1.0, dark, pool_reachable=True)
    watch.observe(600.0, dark, pool_reachable=True)
    assert watch.brake(600.0) is not None
    assert watch.brake(601.0) is None


def test_an_unreachable_pool_puts_the_brake_on() -> None:
    watch = Watch(started_s=0.0)
    watch.observe(5.0, [], pool_reachable=True)
    assert watch.brake(5.0) is None
    watch.observe(6.0, [], pool_reachable=False)
    assert watch.brake(6.0) is not None


LOOKS = st.lists(st.tuples(st.floats(0.1, 15.0), st.booleans(), st.booleans(), st.booleans()), max_size=60)


@given(LOOKS)
def test_nobody_is_dead_before_a_full_silent_period_of_the_watchers_own(
    looks: list[tuple[float, bool, bool, bool]],
) -> None:
    watch, now_s, connected_s, was_reachable = Watch(started_s=0.0), 0.0, 0.0, False
    for wait_s, suspect, answers, reachable in looks:
        now_s += wait_s
        if reachable and not was_reachable:
            connected_s = now_s
        was_reachable = reachable
        watch.observe(now_s, [sighting(suspect=suspect, answers=answers)], pool_reachable=reachable)
        judged = verdict(Role.ROLLOUT, watch.evidence("rollout-0", 1), now_s)
        if reachable and now_s - connected_s < 30.0:
            assert judged is not Verdict.DEAD
        if not suspect:
            assert judged is Verdict.ALIVE
