"""Whether a training group gets on, by a watcher that is given its clock and the ranks' signs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.core.progress import GroupWatch, Hang, Phase, ProgressLimits, RankSign

LIMITS = ProgressLimits()


class Group:
    """A group of ranks and its watcher, with a clock that is moved by hand."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.now_s = self.entered_s = 0.0
        self.watch = GroupWatch()
        self.signs = [RankSign(rank, Phase.START, 0, 0) for rank in range(num_ranks)]

    def enter(self, phase: Phase, ranks: Sequence[int] | None = None) -> None:
        for rank in range(len(self.signs)) if ranks is None else ranks:
            sign = self.signs[rank]
            steps, longest_s = sign.num_steps, sign.longest_step_s
            if sign.phase is Phase.STEP:
                steps, longest_s = steps + 1, max(longest_s, self.now_s - self.entered_s)
            self.signs[rank] = RankSign(rank, phase, sign.marks + 1, sign.beats, steps, longest_s)
        self.entered_s = self.now_s

    def run(self, for_s: float, *, beating: Iterable[int] | None = None, stopped: Iterable[int] = ()) -> Hang | None:
        """Looks once a second; the first Hang ends it. `beating`: None for all ranks."""
        alive = set(range(len(self.signs)) if beating is None else beating)
        ends_s = self.now_s + for_s
        while self.now_s < ends_s:
            self.now_s += 1.0
            self.signs = [replace(s, beats=s.beats + 1) if s.rank in alive else s for s in self.signs]
            hang = self.watch.look(self.now_s, self.signs, stopped)
            if hang is not None:
                return hang
        return None

    def steps(self, num: int, step_s: float) -> None:
        for _ in range(num):
            self.enter(Phase.STEP)
            assert self.run(step_s) is None
            self.enter(Phase.WAIT)
            assert self.run(1) is None


@pytest.mark.parametrize(
    ("phase", "patience_s"),
    [
        (Phase.START, LIMITS.slow_s),
        (Phase.STEP, LIMITS.slow_s),
        (Phase.SAVE, LIMITS.slow_s),
        (Phase.END, LIMITS.slow_s),
    ],
)
def test_before_anything_is_measured_a_beating_rank_gets_half_an_hour(phase: Phase, patience_s: float) -> None:
    group = Group()
    group.enter(phase)
    assert group.run(patience_s) is None
    hang = group.run(2)
    assert hang is not None and "rank 0 has made no progress" in hang.reason


def test_a_rank_may_wait_for_ever_as_long_as_it_beats() -> None:
    group = Group()
    group.enter(Phase.WAIT)
    assert group.run(100_000) is None


@pytest.mark.parametrize(("step_s", "limit_s"), [(1, 60), (5, 60), (20, 200), (400, 1800)])
def test_the_limit_of_a_step_is_ten_times_the_longest_step_within_bounds(step_s: float, limit_s: float) -> None:
    group = Group()
    group.steps(3, step_s)
    assert group.watch.step_limit_s == limit_s
    group.enter(Phase.STEP)
    assert group.run(limit_s) is None
    hang = group.run(2)
    assert hang is not None and "in a training step" in hang.reason and f"limit {limit_s:.0f} s" in hang.reason


def test_the_longest_step_counts_not_the_last() -> None:
    group = Group()
    group.steps(1, 30)
    group.steps(20, 1)
    assert group.watch.step_limit_s == 300


def test_a_stopped_process_is_noticed_after_thirty_seconds_in_whatever_phase() -> None:
    for phase in (Phase.START, Phase.WAIT, Phase.STEP, Phase.SAVE):
        group = Group(2)
        group.enter(phase)
        assert group.run(30, beating=[0], stopped=[77]) is None
        hang = group.run(1, beating=[0], stopped=[77])
        assert hang is not None and "process 77" in hang.reason


def test_a_process_that_goes_on_in_time_starts_from_nothing() -> None:
    group = Group()
    group.enter(Phase.STEP)
    assert group.run(25, beating=[], stopped=[77]) is None
    assert group.run(1) is None
    assert group.run(25, beating=[], stopped=[77]) is None


def test_a_rank_without_beats_is_named_though_its_peer_beats_and_waits() -> None:
    group = Group(2)
    group.enter(Phase.WAIT)
    assert group.run(1) is None
    assert group.run(LIMITS.silent_s - 1, beating=[0]) is None
    hang = group.run(1, beating=[0])
    assert hang is not None and hang.reason.startswith("rank 1 has shown no sign of life for 120 s")


def test_a_rank_that_has_ended_owes_no_beat() -> None:
    group = Group(2)
    group.enter(Phase.WAIT)
    assert group.run(1) is None
    group.enter(Phase.END, [1])
    assert group.run(LIMITS.silent_s * 3, beating=[0]) is None


def test_a_rank_that_never_came_as_far_as_a_beat_gets_the_time_of_a_start() -> None:
    group = Group()
    assert group.run(LIMITS.slow_s, beating=[]) is None
    hang = group.run(2, beating=[])
    assert hang is not None and "at its start" in hang.reason


def test_a_watcher_that_slept_blames_nobody_for_it() -> None:
    group = Group()
    group.enter(Phase.WAIT)
    assert group.run(5, stopped=[77]) is None
    group.now_s += 10_000
    assert group.run(20, stopped=[77]) is None, "its sleep does not count"
    assert group.run(10, stopped=[77]) is not None


def test_a_step_is_known_only_when_every_rank_has_finished_it() -> None:
    watch = GroupWatch()
    done = RankSign(0, Phase.WAIT, 6, 9, num_steps=3, longest_step_s=2.0)
    watch.look(0.0, [done, RankSign(1, Phase.STEP, 5, 9, num_steps=2, longest_step_s=2.0)])
    assert watch.step_limit_s == LIMITS.slow_s
    watch.look(1.0, [done, RankSign(1, Phase.WAIT, 6, 9, num_steps=3, longest_step_s=7.0)])
    assert watch.step_limit_s == 70


@given(factors=st.lists(st.floats(0.1, 9.0), min_size=1, max_size=6), look_every_s=st.floats(0.5, 4.0))
def test_steps_of_up_to_nine_times_the_longest_before_are_never_a_hang(
    factors: list[float], look_every_s: float
) -> None:
    group = Group()
    group.steps(3, 20.0)
    longest_s, sign, now_s = 20.0, group.signs[0], group.now_s
    for factor in factors:
        taken_s = min(400.0, factor * longest_s)
        longest_s = max(longest_s, taken_s)
        sign = replace(sign, phase=Phase.STEP, marks=sign.marks + 1)
        ends_s = now_s + taken_s
        while now_s < ends_s:
            now_s += look_every_s
            sign = replace(sign, beats=sign.beats + 1)
            assert group.watch.look(now_s, [sign]) is None
        sign = replace(sign, phase=Phase.WAIT, marks=sign.marks + 1, num_steps=sign.num_steps + 1)
        sign = replace(sign, longest_step_s=longest_s)
        assert group.watch.look(now_s, [sign]) is None
