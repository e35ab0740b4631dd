"""Repack: which replicas are emptied, onto which, and when a move does not pay."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar.core.identity import GroupKey, SampleKey, Version
from laminar.core.repack import (
    RepackLimits,
    RepackMove,
    RepackPlan,
    RepackSnapshot,
    ReplicaLoad,
    RunningTrajectory,
    Stay,
    candidates,
    plan_repack,
    still_fits,
)
from laminar.core.samples import Holder

LIMITS = RepackLimits(
    batch_bound=8, step_base_s=0.02, prefill_tokens_per_s=10_000, move_overhead_s=0.5, refresh_s=1.0, growth_tokens=100
)
CAPACITY = 10_000


def trajectory(owner: int, index: int, kv: int = 500, expected: int = 1000, **other: object) -> RunningTrajectory:
    key = SampleKey(GroupKey(0, owner), index)
    return replace(RunningTrajectory(key, kv_tokens=kv, expected_tokens=expected), **other)  # type: ignore[arg-type]


def replica(
    index: int, num: int = 2, *, kv: int = 500, expected: int = 1000, version: int = 1, **other: object
) -> ReplicaLoad:
    trajectories = tuple(trajectory(index, i, kv, expected) for i in range(num))
    load = ReplicaLoad(
        holder=Holder(f"rollout-{index}", 1),
        version=Version(version),
        kv_capacity_tokens=CAPACITY,
        kv_used_tokens=num * kv,
        kv_used_before_tokens=None,
        num_waiting=0,
        trajectories=trajectories,
    )
    return replace(load, **other)  # type: ignore[arg-type]


def plan(*replicas: ReplicaLoad, newest: int = 1, num_leases: int = 100, limits: RepackLimits = LIMITS) -> RepackPlan:
    return plan_repack(RepackSnapshot(replicas, Version(newest), num_leases), limits)


def moved(made: RepackPlan) -> list[tuple[str, str]]:
    return [(move.source.slot, move.to.slot) for move in made.moves]


def stay_of(made: RepackPlan, index: int) -> Stay:
    return dict(made.stays)[Holder(f"rollout-{index}", 1)]


def test_the_emptiest_is_emptied_onto_the_one_that_is_fullest_afterwards() -> None:
    made = plan(replica(0, 1), replica(1, 3), replica(2, 6))
    assert moved(made) == [("rollout-0", "rollout-2")]
    (move,) = made.moves
    assert move.keys == (SampleKey(GroupKey(0, 0), 0),)
    # 1000 steps of 20 ms saved; 500 tokens at 10,000 a second, and half a second for the move itself.
    assert (move.gain_s, move.cost_s) == (pytest.approx(20.0), pytest.approx(0.55))


def test_many_tails_are_packed_onto_few() -> None:
    assert moved(plan(*(replica(i, 2) for i in range(6)))) == [
        ("rollout-0", "rollout-5"),
        ("rollout-1", "rollout-5"),
        ("rollout-2", "rollout-5"),
        ("rollout-3", "rollout-4"),
    ]


def test_versions_are_packed_apart_the_oldest_first() -> None:
    made = plan(replica(0, version=3), replica(1, version=2), replica(2, version=3), replica(3, version=2), newest=3)
    assert moved(made) == [("rollout-1", "rollout-3"), ("rollout-0", "rollout-2")]


def test_a_version_on_one_replica_only_stays_there() -> None:
    assert plan(replica(0, version=1), replica(1, version=2), newest=2).moves == ()


TAIL = [
    # what                                      used, before, waiting -> in the tail
    ("flat and nothing waits", 4000, 4000, 0, True),
    ("first seen and nothing waits", 4000, None, 0, True),
    ("falling though something waits", 4000, 4500, 1, True),
    ("flat and something waits", 4000, 4000, 1, False),
    ("rising and something waits", 4500, 4000, 1, False),
    ("full and falling", 9900, 9950, 0, False),
    ("just below full and falling", 9899, 9950, 0, True),
]


@pytest.mark.parametrize(("used", "before", "waiting", "in_tail"), [row[1:] for row in TAIL], ids=[r[0] for r in TAIL])
def test_the_tail_is_known_by_the_kv_cache_and_the_queue(
    used: int, before: int | None, waiting: int, in_tail: bool
) -> None:
    load = replica(0, kv_used_tokens=used, kv_used_before_tokens=before, num_waiting=waiting)
    assert candidates([load], LIMITS) == ([load.holder] if in_tail else [])


STAYS = [
    ("too many", replica(0, 8, kv=10), Stay.TOO_MANY),
    ("not usable", replica(0, usable=False), Stay.NOT_USABLE),
    ("queued work", replica(0, num_waiting=3), Stay.NOT_IN_TAIL),
    ("moved in the round before", replica(0, trajectories=(trajectory(0, 0, settled=False),)), Stay.UNSETTLED),
    ("moved as often as allowed", replica(0, trajectories=(trajectory(0, 0, moves=3),)), Stay.MOVED_OFTEN),
    ("about to end", replica(0, expected=20), Stay.NO_GAIN),
    ("too large for the other", replica(0, kv=3800), Stay.NO_ROOM),
]


@pytest.mark.parametrize(("load", "why"), [row[1:] for row in STAYS], ids=[row[0] for row in STAYS])
def test_a_replica_stays_and_the_plan_says_why(load: ReplicaLoad, why: Stay) -> None:
    # The other one has moved as often as allowed, so that it can only receive.
    other = replica(1, trajectories=tuple(trajectory(1, i, moves=3) for i in range(5)), kv_used_tokens=2500)
    made = plan(load, other)
    assert made.moves == ()
    assert stay_of(made, 0) is why


def test_a_destination_that_ends_soon_would_only_swap_places_and_is_passed_by() -> None:
    made = plan(replica(0, 1), replica(1, 4, expected=10), replica(2, 2))
    assert moved(made) == [("rollout-0", "rollout-2")]


def test_a_long_context_does_not_move_for_less_than_it_costs() -> None:
    long = RepackLimits(batch_bound=64, step_base_s=0.01, prefill_tokens_per_s=10_000)
    loads = [replica(i, 1, kv=100_000, expected=900, kv_capacity_tokens=10**6) for i in range(2)]
    made = plan(*loads, limits=long)  # 10 s of prefill for 9 s of readings
    assert made.moves == () and stay_of(made, 0) is Stay.NO_GAIN
    assert len(plan(*loads, limits=replace(long, prefill_tokens_per_s=12_000)).moves) == 1


def test_the_reserve_for_growth_counts_as_room() -> None:
    tight = replica(1, 4, kv=2100)  # 8400 held + 400 reserved + 500 + 100 fit below 9900; one token more each does not
    assert moved(plan(replica(0, 1), tight)) == [("rollout-0", "rollout-1")]
    assert plan(replica(0, 1), tight, limits=replace(LIMITS, growth_tokens=201)).moves == ()


def test_growth_is_reserved_only_as_far_as_it_is_expected() -> None:
    tight = replica(1, 4, kv=2100, expected=40)
    assert moved(plan(replica(0, 1), tight, limits=replace(LIMITS, growth_tokens=9000))) == []
    short = plan(replica(0, 1, expected=400), tight, limits=replace(LIMITS, growth_tokens=9000))
    assert moved(short) == [("rollout-0", "rollout-1")]


def test_nothing_is_freed_that_nobody_needs() -> None:
    made = plan(replica(0), replica(1), num_leases=0)
    assert made.moves == () and stay_of(made, 0) is Stay.NO_USE


def test_only_as_many_are_freed_as_would_be_leased() -> None:
    assert len(plan(*(replica(i) for i in range(6)), num_leases=1).moves) == 1


def test_a_newer_version_alone_is_worth_the_time_of_its_load() -> None:
    # A second of loading; the move takes 0.6 s.
    made = plan(replica(0), replica(1), num_leases=0, newest=2)
    assert [(move.reason, move.gain_s) for move in made.moves] == [("a newer version to load", pytest.approx(1.0))]
    cheap = plan(replica(0), replica(1), num_leases=0, newest=2, limits=replace(LIMITS, refresh_s=0.5))
    assert cheap.moves == ()


def test_larger_and_smaller_replicas_are_compared_by_how_full_they_are() -> None:
    large = replica(1, 3, kv_capacity_tokens=40_000)
    assert moved(plan(replica(0, 1), large, replica(2, 2)))[0] == ("rollout-0", "rollout-2")


def test_a_merge_that_pays_only_after_another_is_made_too() -> None:
    # rollout-0 is too large for rollout-1, and rollout-2 ends too soon for it, until rollout-1 is emptied onto that.
    loads = [
        replica(0, 1, kv=1000, kv_used_tokens=100),
        replica(1, 1, kv=150, kv_capacity_tokens=400),
        replica(2, 5, kv=1000, expected=3),
    ]
    limits = replace(LIMITS, move_overhead_s=0.0)
    assert moved(plan(*loads, limits=limits)) == [("rollout-1", "rollout-2"), ("rollout-0", "rollout-2")]
    without = [loads[0], loads[2]]
    assert moved(plan(*without, limits=limits)) == []


def test_among_hundreds_the_fullest_that_fits_is_found() -> None:
    loads = [replica(0, 1, kv=40), *(replica(i, 1, kv=60 * i) for i in range(1, 160))]
    # 9540 and 40 with twice 150 of growth are below 9900; with twice 200, rollout-157's 9420 are the most that are.
    for growth_tokens, fullest in ((150, "rollout-159"), (200, "rollout-157")):
        made = plan(*loads, limits=replace(LIMITS, growth_tokens=growth_tokens))
        assert moved(made)[0] == ("rollout-0", fullest)


def test_the_order_of_the_snapshot_does_not_matter() -> None:
    loads = [replica(i, 1 + i % 3) for i in range(7)]
    assert plan(*loads) == plan(*reversed(loads))


def test_a_move_is_checked_again_with_what_is_there_when_it_is_made() -> None:
    source, to = replica(0, 1), replica(1, 4)
    (move,) = plan(source, to).moves
    assert still_fits(move, source, to, LIMITS)
    assert not still_fits(move, source, replica(1, 8), LIMITS)
    assert not still_fits(move, source, replica(1, 4, kv=2400), LIMITS)
    assert not still_fits(move, source, replica(1, 4, version=2), LIMITS)
    assert not still_fits(move, source, replace(to, usable=False), LIMITS)


# --- properties -----------------------------------------------------------------------------------------------------

trajectories = st.builds(
    lambda kv, expected, moves, settled: (kv, expected, moves, settled),
    st.integers(1, 4000),
    st.integers(0, 3000),
    st.integers(0, 3),
    st.booleans() | st.just(True),
)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[RepackSnapshot, RepackLimits]:
    limits = RepackLimits(
        batch_bound=draw(st.integers(2, 12)),
        step_base_s=0.02,
        prefill_tokens_per_s=draw(st.sampled_from([500.0, 10_000.0])),
        move_overhead_s=draw(st.sampled_from([0.0, 2.0])),
        refresh_s=1.0,
        growth_tokens=draw(st.integers(0, 2000)),
    )
    loads: list[ReplicaLoad] = []
    for index in range(draw(st.integers(0, 12))):
        rows = draw(st.lists(trajectories, max_size=10))
        held = tuple(
            trajectory(index, i, kv, expected, moves=moves, settled=settled)
            for i, (kv, expected, moves, settled) in enumerate(rows)
        )
        loads.append(
            replica(
                index,
                version=draw(st.integers(1, 3)),
                kv_capacity_tokens=draw(st.sampled_from([10_000, 20_000])),
                kv_used_tokens=draw(st.integers(0, sum(each.kv_tokens for each in held))),
                kv_used_before_tokens=draw(st.none() | st.integers(0, 20_000)),
                num_waiting=draw(st.integers(0, 1)),
                trajectories=held,
                usable=draw(st.booleans() | st.just(True)),
            )
        )
    return RepackSnapshot(tuple(loads), Version(3), draw(st.integers(0, 12))), limits


def after(loads: list[ReplicaLoad] | tuple[ReplicaLoad, ...], made: RepackPlan) -> list[ReplicaLoad]:
    """The fleet once the moves have been made: what moved has one move more and has not settled."""
    by_holder = {load.holder: load for load in loads}
    for move in made.moves:
        source, to = by_holder[move.source], by_holder[move.to]
        arrived = tuple(replace(each, moves=each.moves + 1, settled=False) for each in source.trajectories)
        by_holder[move.source] = replace(source, trajectories=(), kv_used_tokens=0)
        kv_used = to.kv_used_tokens + sum(each.kv_tokens for each in arrived)
        by_holder[move.to] = replace(to, trajectories=to.trajectories + arrived, kv_used_tokens=kv_used)
    return list(by_holder.values())


@given(fleets())
def test_no_move_mixes_versions_and_each_trajectory_is_placed_once(fleet: tuple[RepackSnapshot, RepackLimits]) -> None:
    snapshot, limits = fleet
    made = plan_repack(snapshot, limits)
    by_holder = {load.holder: load for load in snapshot.replicas}
    for move in made.moves:
        source, to = by_holder[move.source], by_holder[move.to]
        assert source.version == to.version == move.version
        assert move.keys == tuple(each.key for each in source.trajectories)
    sources = Counter(move.source for move in made.moves)
    assert all(count == 1 for count in sources.values())
    assert not sources.keys() & {move.to for move in made.moves}
    # Every replica with work either is emptied or says why not.
    busy = {load.holder for load in snapshot.replicas if load.trajectories}
    assert sorted([*sources, *(holder for holder, _ in made.stays)]) == sorted(busy)


@given(fleets())
def test_no_destination_passes_its_ceiling_or_the_batch_bound_with_growth(
    fleet: tuple[RepackSnapshot, RepackLimits],
) -> None:
    snapshot, limits = fleet
    made = plan_repack(snapshot, limits)
    touched = {move.to for move in made.moves}
    for load in after(snapshot.replicas, made):
        if load.holder in touched:
            assert len(load.trajectories) <= limits.batch_bound
            grown = sum(each.kv_tokens + min(each.expected_tokens, limits.growth_tokens) for each in load.trajectories)
            assert grown <= limits.kv_ceiling * load.kv_capacity_tokens


@given(fleets())
def test_every_move_gains_more_than_it_costs_and_is_of_use(fleet: tuple[RepackSnapshot, RepackLimits]) -> None:
    snapshot, limits = fleet
    made = plan_repack(snapshot, limits)
    assert all(move.gain_s > move.cost_s for move in made.moves)
    no_newer = [move for move in made.moves if move.version == snapshot.newest]
    assert len(no_newer) <= snapshot.num_leases


@settings(max_examples=300)
@given(fleets())
def test_after_the_moves_nothing_more_moves_and_nothing_moves_twice_in_a_row(
    fleet: tuple[RepackSnapshot, RepackLimits],
) -> None:
    snapshot, limits = fleet
    made = plan_repack(snapshot, limits)
    left = RepackSnapshot(
        tuple(after(snapshot.replicas, made)), snapshot.newest, max(0, snapshot.num_leases - len(made.moves))
    )
    again = plan_repack(left, limits)
    assert again.moves == (), f"{made.moves} and then {again.moves}"
    # Whatever else happens at the destinations: what has just moved does not move in the next round.
    just_moved = {key for move in made.moves for key in move.keys}
    eager = replace(left, replicas=tuple(replace(load, kv_used_before_tokens=10**6) for load in left.replicas))
    second = plan_repack(replace(eager, num_leases=99), limits)
    assert not just_moved & {key for move in second.moves for key in move.keys}


@given(fleets())
def test_the_fullest_fitting_destination_is_taken(fleet: tuple[RepackSnapshot, RepackLimits]) -> None:
    """Of the first move: no other candidate of the version with room would be fuller."""
    snapshot, limits = fleet
    made = plan_repack(snapshot, limits)
    if not made.moves:
        return
    first: RepackMove = made.moves[0]
    by_holder = {load.holder: load for load in snapshot.replicas}

    def reserved(load: ReplicaLoad) -> int:
        return sum(each.kv_tokens + min(each.expected_tokens, limits.growth_tokens) for each in load.trajectories)

    source = by_holder[first.source]
    chosen = by_holder[first.to]
    fullness = (reserved(chosen) + reserved(source)) / chosen.kv_capacity_tokens
    for holder in candidates(snapshot.replicas, limits):
        other = by_holder[holder]
        if other.version != first.version or other in (source, chosen):
            continue
        filled = (reserved(other) + reserved(source)) / other.kv_capacity_tokens
        fits = filled <= limits.kv_ceiling
        few = len(other.trajectories) + len(source.trajectories) <= limits.batch_bound
        pays = max(each.expected_tokens for each in other.trajectories) * limits.step_base_s > first.cost_s
        assert not (fits and few and pays and filled > fullness + 1e-12)
