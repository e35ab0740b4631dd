"""The reconciler against a small simulated world: what it does, what it never does, and that it comes to rest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.core.chain import ChainNode
from laminar.core.events import describe
from laminar.core.identity import Incarnation
from laminar.core.liveness import Brake, Evidence, Role
from laminar.core.reconcile import (
    Action,
    Create,
    Fence,
    Kill,
    PublishChain,
    RequestStop,
    SetCondition,
    SetPhase,
    Stop,
    reconcile,
)
from laminar.core.restarts import Restarts, after_exit, after_progress, exhausted
from laminar.core.snapshot import (
    ChainState,
    Exit,
    JobPhase,
    Member,
    MemberPhase,
    Pool,
    PoolStage,
    Snapshot,
    Spec,
    places,
)

SPEC = Spec(num_rollouts=3, nodes=("m0", "m1"), backoff_limit=2)
DEAD = Evidence(suspect_since_s=0.0, unanswered_since_s=0.0)
NOW_S = 1000.0


def member(slot: str, life: int = 1, **changes: object) -> Member:
    role, _, index = slot.rpartition("-")
    place = {p.slot: p for p in places(SPEC)}.get(slot)
    made = Member(
        slot=slot,
        role=Role(role),
        index=int(index),
        life=life,
        node=place.node if place else "m0",
        phase=MemberPhase.RUNNING,
        incarnation=life,
        ready=True,
        address=f"127.0.0.1:{7000 + int(index)}" if role == "relay" else "",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def exited(slot: str, code: int | None, life: int = 1, at_s: float = NOW_S - 1, **changes: object) -> Member:
    return member(slot, life, phase=MemberPhase.EXITED, exit=Exit(at_s, code, "last words"), ready=False, **changes)


def settled(**changes: object) -> Snapshot:
    """A job that runs well."""
    members = tuple(member(place.slot) for place in places(SPEC))
    relays = [m for m in members if m.role is Role.RELAY]
    listeners = frozenset((m.slot, m.life) for m in members if m.role in (Role.RELAY, Role.POOL))
    made = Snapshot(
        now_s=NOW_S,
        started_s=0.0,
        spec=SPEC,
        phase=JobPhase.RUNNING,
        members=members,
        chain=ChainState(
            epoch=3,
            members=tuple(ChainNode(m.slot, Incarnation(m.life), m.address, m.node) for m in relays),
            highest_reported=3,
            acknowledged=listeners,
        ),
        pool=Pool(reachable=True, attempt=1),
        attempt=1,
        lives={m.slot: 1 for m in members},
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def with_members(snapshot: Snapshot, *changed: Member) -> Snapshot:
    slots = {m.slot for m in changed}
    return replace(snapshot, members=(*(m for m in snapshot.members if m.slot not in slots), *changed))


def slots_of(actions: tuple[Action, ...], kind: type[Create] | type[Kill] | type[Stop] | type[Fence]) -> list[str]:
    return [a.slot for a in actions if isinstance(a, kind)]


def test_a_job_that_runs_well_needs_nothing() -> None:
    assert reconcile(settled()) == ()


def test_everything_starts_at_once_with_the_pool_first() -> None:
    actions = reconcile(
        settled(members=(), chain=ChainState(), pool=Pool(), attempt=0, lives={}, phase=JobPhase.STARTING)
    )
    created = [a for a in actions if isinstance(a, Create)]
    assert [a.slot for a in created] == [
        "pool-0", "relay-0", "relay-1", "trainer-0", "rollout-0", "rollout-1", "rollout-2",
    ]  # fmt: skip
    assert [a.node for a in created if a.role is Role.ROLLOUT] == ["m0", "m1", "m0"]
    assert {a.life for a in created} == {1}


def test_lives_and_attempts_go_on_from_what_is_stored_or_reported() -> None:
    actions = reconcile(settled(members=(), attempt=4, lives={"rollout-0": 7}, pool=Pool(reachable=True, attempt=6)))
    lives = {a.slot: a.life for a in actions if isinstance(a, Create)}
    assert lives["trainer-0"] == 7
    assert lives["rollout-0"] == 8


def test_a_rollout_that_exited_is_fenced_and_then_replaced() -> None:
    snapshot = with_members(settled(), exited("rollout-1", -9))
    assert reconcile(snapshot) == (Fence("rollout-1", 1, 1, "life 1 was ended by signal 9"),)
    fenced = with_members(settled(), exited("rollout-1", -9, fenced=True))
    assert reconcile(fenced) == (Create("rollout-1", Role.ROLLOUT, 1, 2, "m1", "life 1 was ended by signal 9"),)


def test_a_rollout_that_never_registered_needs_no_fence() -> None:
    snapshot = with_members(settled(), exited("rollout-1", 1, incarnation=None))
    assert slots_of(reconcile(snapshot), Create) == ["rollout-1"]


def test_a_dead_rollout_is_fenced_then_killed_and_not_replaced_before_it_is_gone() -> None:
    dead = member("rollout-0", evidence=DEAD, ready=False)
    assert [type(a) for a in reconcile(with_members(settled(), dead))] == [Fence]
    assert [type(a) for a in reconcile(with_members(settled(), replace(dead, fenced=True)))] == [Kill]


def test_nothing_is_killed_while_the_brake_is_on_but_the_condition_says_so() -> None:
    dead = [member(slot, evidence=DEAD, ready=False, fenced=True) for slot in ("rollout-0", "rollout-1", "relay-0")]
    actions = reconcile(replace(with_members(settled(), *dead), brake=Brake(NOW_S - 5, "many")))
    assert slots_of(actions, Kill) == []
    assert SetCondition("MassFailureSuspected", "many", "many") in actions


def test_the_brake_does_not_keep_a_dead_pool_from_being_replaced() -> None:
    pool = member("pool-0", evidence=Evidence(unanswered_since_s=NOW_S - 31))
    snapshot = replace(with_members(settled(), pool), brake=Brake(NOW_S - 1, "away"), pool=Pool(reachable=False))
    assert slots_of(reconcile(snapshot), Kill) == ["pool-0"]


def test_a_suspect_relay_leaves_the_chain_and_joins_again_at_the_tail() -> None:
    suspect = with_members(settled(), member("relay-0", ready=False))
    (left,) = reconcile(suspect)
    assert isinstance(left, PublishChain)
    assert (left.epoch, [n.slot for n in left.members]) == (4, ["relay-1"])
    back = replace(settled(), chain=replace(settled().chain, epoch=4, members=left.members))
    (joined,) = reconcile(back)
    assert isinstance(joined, PublishChain)
    assert (joined.epoch, [n.slot for n in joined.members]) == (5, ["relay-1", "relay-0"])


def test_an_epoch_is_above_anything_that_was_ever_reported() -> None:
    chain = replace(settled().chain, highest_reported=9)
    (published,) = reconcile(replace(settled(), chain=chain))
    assert isinstance(published, PublishChain)
    assert published.epoch == 10


def test_who_has_not_acknowledged_the_epoch_is_told_again() -> None:
    chain = replace(settled().chain, acknowledged=frozenset({("relay-0", 1), ("pool-0", 1)}))
    (published,) = reconcile(replace(settled(), chain=chain))
    assert isinstance(published, PublishChain)
    assert (published.epoch, published.to) == (3, ("relay-1",))


def test_the_first_chain_waits_for_all_relays_but_not_for_ever() -> None:
    lonely = with_members(settled(chain=ChainState()), member("relay-1", ready=False))
    assert reconcile(replace(lonely, started_s=NOW_S - 5)) == ()
    (published,) = reconcile(replace(lonely, started_s=NOW_S - 11))
    assert isinstance(published, PublishChain)


def test_a_failed_attempt_waits_for_its_backoff_and_counts() -> None:
    failed = with_members(settled(), exited("trainer-0", 1))
    waiting = replace(failed, restarts={"trainer-0": Restarts(failures=1, not_before_s=NOW_S + 1)})
    assert reconcile(waiting) == ()
    (created,) = reconcile(replace(waiting, now_s=NOW_S + 1))
    assert created == Create("trainer-0", Role.TRAINER, 0, 2, "m0", "life 1 exited with 1")
    (ended,) = reconcile(replace(failed, restarts={"trainer-0": Restarts(failures=3)}))
    assert isinstance(ended, SetPhase) and ended.phase is JobPhase.FAILED
    assert "3 times" in ended.reason and "last words" in ended.reason


@pytest.mark.parametrize("slot", ["pool-0", "relay-0", "rollout-1", "trainer-0"])
def test_exit_code_2_of_any_child_fails_the_job_with_its_words(slot: str) -> None:
    assert reconcile(with_members(settled(), exited(slot, 2))) == (SetPhase(JobPhase.FAILED, "last words"),)


def test_five_quick_crashes_in_a_row_fail_the_job() -> None:
    crashes = Restarts()
    for n in range(5):
        assert exhausted(crashes, Role.ROLLOUT, 5) is None
        crashes = after_exit(crashes, Role.ROLLOUT, lived_s=1.0, now_s=10.0 * n)
    (ended,) = reconcile(replace(with_members(settled(), exited("rollout-1", 1)), restarts={"rollout-1": crashes}))
    assert isinstance(ended, SetPhase) and ended.phase is JobPhase.FAILED


def test_a_long_life_or_a_newer_checkpoint_clears_the_record() -> None:
    assert after_exit(Restarts(quick_crashes=4), Role.RELAY, lived_s=60.0, now_s=5.0) == Restarts(not_before_s=5.0)
    assert after_progress(Restarts(failures=2, disruptions=3, not_before_s=1.0)) == Restarts(not_before_s=1.0)


def test_a_life_that_was_killed_before_it_ever_served_counts_as_a_crash() -> None:
    hung = after_exit(Restarts(), Role.POOL, lived_s=35.0, now_s=0.0, served=False, disrupted=True)
    assert hung.quick_crashes == 1
    silent = after_exit(hung, Role.POOL, lived_s=35.0, now_s=0.0, served=True, disrupted=True)
    assert silent.quick_crashes == 0


def test_the_trainers_waits_double_up_to_a_cap() -> None:
    record, waits_s = Restarts(), list[float]()
    for _ in range(7):
        record = after_exit(record, Role.TRAINER, lived_s=100.0, now_s=0.0)
        waits_s.append(record.not_before_s)
    assert waits_s == [1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize(
    ("stage", "expected"), [(PoolStage.COMPLETE, JobPhase.COMPLETE), (PoolStage.STOPPED, JobPhase.STOPPED)]
)
def test_the_job_ends_when_the_pool_and_the_trainer_say_so(stage: PoolStage, expected: JobPhase) -> None:
    pool = Pool(reachable=True, stage=stage, attempt=1)
    assert reconcile(settled(pool=pool)) == ()
    left = with_members(settled(), exited("trainer-0", 0))
    (ended,) = reconcile(replace(left, pool=pool))
    assert isinstance(ended, SetPhase) and ended.phase is expected
    # The end of the record is still to be asked of a pool that is being replaced.
    assert reconcile(replace(left, pool=replace(pool, reachable=False))) == ()


def test_a_stopped_job_does_not_wait_for_a_trainer_that_has_not_begun() -> None:
    """A stop while the next attempt still starts: everything committed is in a checkpoint already."""
    pool = Pool(reachable=True, stage=PoolStage.STOPPED, attempt=1)
    for trainer in (member("trainer-0", life=2), exited("trainer-0", 137, life=1)):
        stopping = settled(phase=JobPhase.STOPPING, stop_requested=True, stop_acknowledged=True)
        (ended,) = reconcile(replace(with_members(stopping, trainer), pool=pool))
        assert isinstance(ended, SetPhase) and ended.phase is JobPhase.STOPPED


def test_a_trainer_that_has_finished_stays_away_while_the_last_evaluation_runs() -> None:
    pool = Pool(reachable=True, stage=PoolStage.FINISHING, attempt=1, newest_version=80)
    relays = [member("relay-0", newest_version=None), member("relay-1", newest_version=80)]
    done = replace(with_members(settled(), exited("trainer-0", 0, at_s=10.0), *relays), pool=pool)
    assert reconcile(done) == ()


@pytest.mark.parametrize("held", [None, 79])
def test_a_new_attempt_brings_the_weights_back_if_no_relay_holds_them_after_the_trainer_left(held: int | None) -> None:
    """Also when an older relay lives that never got them: a chain of one had made them visible."""
    pool = Pool(reachable=True, stage=PoolStage.FINISHING, attempt=1, newest_version=80)
    relays = [member("relay-0", started_s=20.0), member("relay-1", started_s=5.0, newest_version=held)]
    lost = replace(with_members(settled(), exited("trainer-0", 0, at_s=10.0), *relays), pool=pool)
    assert slots_of(reconcile(lost), Create) == ["trainer-0"]


def test_weights_are_not_taken_for_lost_before_the_relays_have_told_a_new_pool_what_they_hold() -> None:
    pool = Pool(reachable=True, stage=PoolStage.FINISHING, attempt=1, newest_version=80)
    fresh = [member("pool-0", life=2, started_s=NOW_S - 2), exited("trainer-0", 0, at_s=10.0)]
    assert slots_of(reconcile(replace(with_members(settled(), *fresh), pool=pool)), Create) == []


def test_a_trainer_that_left_while_steps_remain_comes_back() -> None:
    left = with_members(settled(), exited("trainer-0", 0, at_s=NOW_S - 3))
    assert reconcile(left) == ()
    assert slots_of(reconcile(replace(left, now_s=NOW_S + 30)), Create) == ["trainer-0"]


def test_an_ended_job_is_wound_down_with_the_pool_last() -> None:
    ended = settled(phase=JobPhase.COMPLETE)
    stopped = slots_of(reconcile(ended), Stop)
    assert "pool-0" not in stopped and len(stopped) == 6
    (last,) = reconcile(replace(ended, members=(member("pool-0"),)))
    assert isinstance(last, Stop)
    stuck = replace(ended, members=(member("rollout-0", stopping_since_s=NOW_S - 11), member("pool-0")))
    assert slots_of(reconcile(stuck), Kill) == ["rollout-0"]


def test_a_rollout_too_many_is_fenced_and_asked_to_leave() -> None:
    surplus = replace(settled(), members=(*settled().members, member("rollout-3")))
    assert [type(a) for a in reconcile(surplus)] == [Fence]
    fenced = replace(settled(), members=(*settled().members, member("rollout-3", fenced=True)))
    assert slots_of(reconcile(fenced), Stop) == ["rollout-3"]


def test_a_stop_is_asked_of_the_pool_until_its_present_life_has_heard() -> None:
    asked = replace(settled(), stop_requested=True)
    assert reconcile(asked) == (RequestStop("asked to stop"), SetPhase(JobPhase.STOPPING, "asked to stop"))
    assert reconcile(replace(asked, phase=JobPhase.STOPPING, stop_acknowledged=True)) == ()


def test_people_read_what_was_done() -> None:
    occurrence = describe(Create("rollout-1", Role.ROLLOUT, 1, 2, "m1", "life 1 was ended by signal 9"))
    assert occurrence is not None
    assert occurrence.text == "rollout-1 replaced by life 2: life 1 was ended by signal 9"


@dataclass
class World:
    """Applies actions as a perfect driver would; each turn is one second. Asserts what must never happen."""

    snapshot: Snapshot
    next_incarnation: int = 100
    log: list[Action] = field(default_factory=list[Action])

    def turn(self) -> tuple[Action, ...]:
        before = self.snapshot
        actions = reconcile(before)
        for action in actions:
            self._apply(action)
        self._progress()
        self.log.extend(actions)
        return actions

    def _apply(self, action: Action) -> None:  # noqa: C901  one case an action
        s = self.snapshot
        match action:
            case Create():
                living = [m for m in s.members if m.slot == action.slot and m.phase is not MemberPhase.EXITED]
                assert not living, f"two lives at once: {action}"
                assert action.life > s.lives.get(action.slot, 0)
                for old in s.members:
                    if old.slot == action.slot and old.role is Role.ROLLOUT and old.incarnation is not None:
                        assert old.fenced, f"replaced without a fence: {action}"
                born = member(action.slot, action.life, phase=MemberPhase.STARTING, incarnation=None, ready=False,
                              started_s=s.now_s)  # fmt: skip
                others = tuple(m for m in s.members if m.slot != action.slot)
                attempt = action.life if action.role is Role.TRAINER else s.attempt
                self.snapshot = replace(
                    s, members=(*others, born), lives={**s.lives, action.slot: action.life}, attempt=attempt
                )
            case Fence():
                self._change(action.slot, action.life, fenced=True)
            case Kill():
                (victim,) = [m for m in s.members if (m.slot, m.life) == (action.slot, action.life)]
                assert victim.evidence != Evidence() or victim.stopping_since_s is not None, f"healthy: {action}"
                assert s.brake is None or victim.role is Role.POOL or s.phase.ended, f"killed on the brake: {action}"
                self._change(action.slot, action.life, phase=MemberPhase.EXITED, exit=Exit(s.now_s, -9), ready=False)
            case Stop():
                self._change(action.slot, action.life, phase=MemberPhase.EXITED, exit=Exit(s.now_s, 0), ready=False)
            case PublishChain():
                assert action.epoch >= s.chain.epoch
                assert action.members, "an empty chain"
                changed = action.members != s.chain.members
                assert not changed or action.epoch > max(s.chain.epoch, s.chain.highest_reported)
                acks = frozenset() if changed or action.epoch > s.chain.epoch else s.chain.acknowledged
                told = {(m.slot, m.life) for m in s.members if m.slot in action.to and m.phase is MemberPhase.RUNNING}
                chain = ChainState(action.epoch, action.members, action.epoch, acks | told)
                self.snapshot = replace(s, chain=chain)
            case RequestStop():
                self.snapshot = replace(s, stop_acknowledged=True)
            case SetPhase():
                self.snapshot = replace(s, phase=action.phase)
            case SetCondition():
                rest = {k: v for k, v in s.conditions.items() if k != action.name}
                self.snapshot = replace(s, conditions=rest | ({action.name: action.text} if action.text else {}))

    def _change(self, slot: str, life: int, **changes: object) -> None:
        members = tuple(
            replace(m, **changes) if (m.slot, m.life) == (slot, life) else m  # type: ignore[arg-type]
            for m in self.snapshot.members
        )
        self.snapshot = replace(self.snapshot, members=members)

    def _progress(self) -> None:
        """A second passes: what was started registers once the pool runs, and the brake passes in the end."""
        s = self.snapshot
        has_pool = any(m.slot == "pool-0" and m.phase is MemberPhase.RUNNING for m in s.members)
        members = list[Member]()
        for m in s.members:
            if m.phase is MemberPhase.STARTING and (has_pool or m.role is Role.POOL):
                self.next_incarnation += 1
                m = replace(m, phase=MemberPhase.RUNNING, incarnation=self.next_incarnation, ready=True)
            members.append(m)
        brake = s.brake if s.brake is not None and s.now_s - s.brake.since_s < 20 else None
        pool = replace(s.pool, reachable=has_pool, attempt=s.attempt)
        self.snapshot = replace(s, now_s=s.now_s + 1, members=tuple(members), brake=brake, pool=pool)


EVIDENCE = st.sampled_from([Evidence(), Evidence(), DEAD, Evidence(suspect_since_s=NOW_S - 1), Evidence(stalled=True)])


@st.composite
def any_member(draw: st.DrawFn, slot: str) -> Member | None:
    life = draw(st.integers(1, 5))
    match draw(st.sampled_from(["none", "exited", "starting", "running", "running"])):
        case "none":
            return None
        case "exited":
            codes = st.sampled_from([1, -9, None])
            incarnation = draw(st.sampled_from([None, 3]))
            return exited(slot, draw(codes), life, fenced=draw(st.booleans()), incarnation=incarnation)
        case "starting":
            return member(slot, life, phase=MemberPhase.STARTING, incarnation=None, ready=False)
        case _:
            evidence = draw(EVIDENCE)
            if slot == "pool-0" and evidence != Evidence():
                evidence = Evidence(unanswered_since_s=draw(st.sampled_from([0.0, NOW_S - 1])))
            ready = evidence == Evidence()
            return member(slot, life, evidence=evidence, ready=ready, fenced=draw(st.booleans()))


@st.composite
def any_snapshot(draw: st.DrawFn) -> Snapshot:
    slots = [place.slot for place in places(SPEC)] + ["rollout-3", "rollout-4", "relay-2"]
    drawn = [draw(any_member(slot)) for slot in slots]
    members = tuple(m for m in drawn if m is not None)
    nodes = [ChainNode(f"relay-{i}", Incarnation(draw(st.integers(1, 3))), f"127.0.0.1:{7000 + i}", f"m{i % 2}")
             for i in draw(st.permutations([0, 1, 2]))[: draw(st.integers(0, 3))]]  # fmt: skip
    epoch = draw(st.integers(0, 5))
    acknowledged = frozenset((m.slot, m.life) for m in members if draw(st.booleans()))
    return Snapshot(
        now_s=NOW_S,
        started_s=draw(st.sampled_from([0.0, NOW_S])),
        spec=SPEC,
        phase=draw(st.sampled_from([JobPhase.STARTING, JobPhase.RUNNING, JobPhase.STOPPING, JobPhase.FAILED])),
        members=members,
        chain=ChainState(epoch, tuple(nodes), draw(st.integers(0, 9)), acknowledged),
        pool=Pool(reachable=draw(st.booleans()), attempt=draw(st.integers(0, 9))),
        attempt=draw(st.integers(0, 9)),
        lives={m.slot: m.life for m in members},
        restarts={m.slot: Restarts(not_before_s=NOW_S + draw(st.integers(0, 5))) for m in members},
        brake=draw(st.sampled_from([None, None, Brake(NOW_S - 5, "many")])),
        stop_requested=draw(st.booleans()),
    )


@settings(max_examples=120, deadline=None)
@given(any_snapshot())
def test_from_any_state_it_reaches_the_wanted_one_and_rests(snapshot: Snapshot) -> None:
    world = World(snapshot)
    quiet = 0
    for _ in range(60):
        quiet = quiet + 1 if not world.turn() else 0
    # Suspicions of members that are merely suspect ripen into death meanwhile; everything has come to rest by now.
    assert quiet >= 5, world.log[-5:]
    living = {m.slot: m for m in world.snapshot.members if m.phase is not MemberPhase.EXITED}
    if world.snapshot.phase.ended:
        assert not living
        return
    assert set(living) == {place.slot for place in places(SPEC)}
    ready = {m.slot for m in living.values() if m.role is Role.RELAY and m.ready}
    chain = world.snapshot.chain
    if ready:  # otherwise there is nobody to make a chain of
        assert {n.slot for n in chain.members} == ready
        assert chain.acknowledged >= {(m.slot, m.life) for m in living.values() if m.role is Role.POOL}


@settings(max_examples=60, deadline=None)
@given(any_snapshot())
def test_every_action_says_why(snapshot: Snapshot) -> None:
    assert all(action.reason for action in reconcile(snapshot))
