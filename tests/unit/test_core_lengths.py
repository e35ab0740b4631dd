"""Lengths of responses: drawn by seed, and what running ones have left."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.core.lengths import LengthRecord, Lognormal, Recorded, uniform


def test_a_seed_always_gives_the_same_length() -> None:
    lengths = Lognormal(1600, 10)
    assert [lengths.of(seed) for seed in range(50)] == [lengths.of(seed) for seed in range(50)]
    assert len({lengths.of(seed) for seed in range(50)}) > 40


def test_median_and_tail_are_as_asked_for() -> None:
    drawn = sorted(Lognormal(1600, 10).of(seed) for seed in range(20_000))
    assert statistics.median(drawn) == pytest.approx(1600, rel=0.03)
    assert drawn[int(0.99 * len(drawn))] == pytest.approx(16_000, rel=0.06)


def test_the_mean_below_a_limit_is_that_of_what_is_drawn() -> None:
    lengths = Lognormal(1600, 10)
    drawn = [min(16_384, lengths.of(seed)) for seed in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(lengths.mean_below(16_384), rel=0.02)


def test_without_a_tail_all_are_the_median() -> None:
    assert {Lognormal(100, 1).of(seed) for seed in range(20)} == {100}
    assert Lognormal(100, 1).mean_below(60) == 60


def test_recorded_lengths_are_drawn_evenly() -> None:
    recorded = Recorded((5, 7, 9))
    drawn = [recorded.of(seed) for seed in range(3000)]
    assert all(900 < drawn.count(length) < 1100 for length in (5, 7, 9))


@pytest.mark.parametrize("make", [lambda: Lognormal(0.5, 2), lambda: Lognormal(5, 0.9), lambda: Recorded(())])
def test_lengths_that_cannot_be_are_refused(make: object) -> None:
    with pytest.raises(ValueError):
        make()  # type: ignore[operator]


@given(st.integers(0, 2**64), st.integers(0, 8))
def test_uniform_numbers_lie_strictly_between_0_and_1(seed: int, stream: int) -> None:
    assert 0 < uniform(seed, stream) < 1


def test_neighbouring_seeds_and_streams_are_independent() -> None:
    values = [uniform(seed, stream) for seed in range(200) for stream in range(5)]
    assert statistics.fmean(values) == pytest.approx(0.5, abs=0.03)
    assert statistics.correlation(values[:-1], values[1:]) == pytest.approx(0, abs=0.1)


def test_with_nothing_known_one_lasts_about_as_long_again() -> None:
    residuals = LengthRecord(16_384).residuals([])
    assert 300 < residuals.expected(1000, 15_384) < 6000
    assert residuals.expected(1000, 15_384) < residuals.expected(4000, 12_384)


def test_the_remaining_budget_is_a_limit() -> None:
    residuals = LengthRecord(1000).residuals([])
    assert residuals.expected(990, 10) <= 10
    assert residuals.expected(500, 0) == 0


@pytest.mark.parametrize("at", [0, 500, 2000, 6000])
def test_what_is_left_is_learned_from_those_that_ended(at: int) -> None:
    lengths, limit = Lognormal(1600, 10), 16_384
    drawn = [min(limit, lengths.of(seed)) for seed in range(20_000)]
    record = LengthRecord(limit, memory=30_000)
    for length in drawn:
        record.observe(length)
    truth = statistics.fmean(length - at for length in drawn if length > at)
    assert record.residuals([]).expected(at, limit - at) == pytest.approx(truth, rel=0.15)


def test_running_responses_keep_early_short_ends_from_making_all_look_short() -> None:
    record = LengthRecord(16_384)
    for _ in range(100):
        record.observe(200)
    alone = record.residuals([]).expected(0, 16_384)
    beside = record.residuals([4000] * 900).expected(0, 16_384)
    assert beside > 5 * alone


def test_old_lengths_fade() -> None:
    rng = random.Random(1)
    record = LengthRecord(16_384, memory=1000)
    for _ in range(2000):
        record.observe(rng.randint(1, 400))
    before = record.residuals([]).expected(0, 16_384)
    for _ in range(6000):
        record.observe(rng.randint(7000, 9000))
    assert before < 600 and record.residuals([]).expected(0, 16_384) > 6000
