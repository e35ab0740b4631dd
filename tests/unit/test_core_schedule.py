"""Schedules, redirect, prompt stream and checkpoint register: tables of cases."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.core.checkpoints import CheckpointRegister, CheckpointRow
from laminar.core.identity import GroupKey, SampleKey, Version
from laminar.core.prompts import PromptStream, StreamPosition, sampling_seed
from laminar.core.redirect import Destination, Lost, plan_redirect
from laminar.core.samples import Holder
from laminar.core.schedule import SCHEDULES, ScheduleView, make_schedule


def view(newest_step: int, committed_step: int, started: int, replica_version: int = 7) -> ScheduleView:
    return ScheduleView(
        newest_version=Version(7), newest_step=newest_step, replica_version=Version(replica_version),
        committed_step=committed_step, prompts_per_step=4, max_ahead_steps=2, started_unconsumed_groups=started,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "newest_step", "committed_step", "started", "startable"),
    [
        ("laminar", 0, 0, 0, 8),
        ("laminar", 0, 0, 7, 1),
        ("laminar", 0, 0, 8, 0),
        ("laminar", 0, 0, 9, 0),
        ("laminar", 3, 4, 2, 6),
        ("synchronous", 0, 0, 0, 4),
        ("synchronous", 0, 0, 3, 1),
        ("synchronous", 0, 0, 4, 0),
        ("synchronous", 3, 4, 0, 0),
        ("synchronous", 4, 4, 0, 4),
    ],
)
def test_startable_groups(schedule: str, newest_step: int, committed_step: int, started: int, startable: int) -> None:
    assert make_schedule(schedule).num_startable_groups(view(newest_step, committed_step, started)) == startable


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_replica_with_old_weights_refreshes_first(name: str) -> None:
    assert make_schedule(name).must_refresh(view(0, 0, 0, replica_version=6))
    assert not make_schedule(name).must_refresh(view(0, 0, 0, replica_version=7))


def test_an_unknown_schedule_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'lamina' is none of laminar, synchronous"):
        make_schedule("lamina")


A, B, C = Holder("rollout-0", 1), Holder("rollout-1", 1), Holder("rollout-2", 1)


def lost(prompt: int, version: int = 3, length: int = 5, *, ended: bool = False) -> Lost:
    return Lost(SampleKey(GroupKey(0, prompt), 0), version, length, ended)


def test_a_partial_goes_only_to_a_replica_that_runs_its_version_and_has_room() -> None:
    plan = plan_redirect(
        [lost(0), lost(1), lost(2)], [Destination(A, 3, 2), Destination(B, 4, 9), Destination(C, None, 9)]
    )
    assert [redirect.to for redirect in plan] == [A, A, None]


def test_the_longest_partials_are_saved_first() -> None:
    plan = plan_redirect([lost(0, length=1), lost(1, length=50)], [Destination(A, 3, 1)])
    assert {redirect.key.group.prompt: redirect.to for redirect in plan} == {1: A, 0: None}


def test_grading_needs_no_room_and_no_version() -> None:
    assert plan_redirect([lost(0, ended=True)], [Destination(A, None, 0)])[0].to == A


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans()), max_size=20),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=5),
)
def test_every_lost_sample_is_decided_once_and_room_is_kept(
    samples: list[tuple[int, int, bool]], replicas: list[tuple[int, int]]
) -> None:
    losses = [lost(i, version, length, ended=ended) for i, (version, length, ended) in enumerate(samples)]
    destinations = [Destination(Holder(f"r{i}", 1), version, room) for i, (version, room) in enumerate(replicas)]
    plan = plan_redirect(losses, destinations)
    assert sorted(r.key for r in plan) == sorted(loss.key for loss in losses)
    by_key = {loss.key: loss for loss in losses}
    for destination in destinations:
        taken = [by_key[r.key] for r in plan if r.to == destination.holder]
        running = [loss for loss in taken if not loss.ended]
        assert len(running) <= destination.room
        assert all(loss.version == destination.version for loss in running)


def test_each_pass_is_a_new_permutation_of_all_prompts() -> None:
    stream = PromptStream(50, seed=3)
    passes = [[stream.draw() for _ in range(50)] for _ in range(3)]
    for number, keys in enumerate(passes):
        assert {key.pass_ for key in keys} == {number}
        assert sorted(key.prompt for key in keys) == list(range(50))
    assert passes[0] != [GroupKey(0, key.prompt) for key in passes[1]]


@given(st.integers(1, 20), st.integers(0, 5), st.integers(0, 60))
def test_a_stream_continues_where_its_position_says(num_prompts: int, seed: int, drawn: int) -> None:
    """Case D2: after a resume no prompt is skipped and none comes twice."""
    first = PromptStream(num_prompts, seed)
    for _ in range(drawn):
        first.draw()
    second = PromptStream(num_prompts, seed, StreamPosition(first.position.pass_, first.position.cursor))
    assert [first.draw() for _ in range(30)] == list(itertools.islice(second, 30))


def test_seeds_differ_by_sample_and_by_job() -> None:
    keys = [SampleKey(GroupKey(0, prompt), index) for prompt in range(20) for index in range(8)]
    assert len({sampling_seed(seed, key) for seed in (0, 1) for key in keys}) == 2 * len(keys)


def row(step: int, attempt: int = 1) -> CheckpointRow:
    return CheckpointRow(step, attempt, f"step-{step}-attempt-{attempt}")


def test_the_newest_checkpoints_are_kept_and_the_rest_may_go() -> None:
    register = CheckpointRegister(keep=2)
    removable = [register.register(row(step)) for step in (10, 20, 30)]
    assert removable == [[], [], [row(10)]]
    assert register.register(row(30)) == [], "a repeated registration changes nothing"
    assert (register.prunable_step, register.restore_point(None)) == (20, row(30))
    assert register.restore_point(29) == row(20)
    assert register.restore_point(19) is None


def test_a_new_attempt_supersedes_the_checkpoints_after_its_own() -> None:
    register = CheckpointRegister(keep=3, kept=[row(10), row(20), row(30)])
    assert register.supersede_after(10) == [row(20), row(30)]
    assert register.kept == [row(10)]
    assert register.register(row(20, attempt=2)) == []


def test_a_second_save_of_a_step_replaces_the_first() -> None:
    register = CheckpointRegister(keep=3, kept=[row(10)])
    assert register.register(row(10, attempt=2)) == [row(10)]
    assert register.kept == [row(10, attempt=2)]
