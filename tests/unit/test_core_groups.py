"""Slicing, packing and advantages of groups."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.core.groups import (
    TRL_ADVANTAGES,
    advantages,
    fill_to,
    num_updates,
    pack,
    share_prompt,
    slice_groups,
    split_updates,
)

SIZES = st.lists(st.integers(1, 500), max_size=60)


def test_advantages_use_the_biased_deviation() -> None:
    result = advantages([1.0, 0.0, 0.0, 0.0])
    assert result is not None
    assert result[0] == pytest.approx(0.75 / (math.sqrt(0.1875) + 1e-6))
    assert sum(result) == pytest.approx(0.0)


def test_a_group_of_equal_rewards_has_no_advantages() -> None:
    assert advantages([0.1] * 7) is None


def test_trl_keeps_a_group_of_equal_rewards_with_zero_advantages() -> None:
    assert advantages([0.3] * 3, TRL_ADVANTAGES) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("rewards", [[], [1.0], [1.0, math.nan], [math.inf, 0.0]])
def test_rewards_that_make_no_statistics_are_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="graded samples|finite"):
        advantages(rewards)


@given(SIZES, st.integers(1, 9))
def test_every_group_belongs_to_exactly_one_rank_in_the_sealed_order(sizes: list[int], world: int) -> None:
    slices = slice_groups(sizes, world)
    assert len(slices) == world
    assert sorted(index for owned in slices for index in owned) == list(range(len(sizes)))
    assert all(list(owned) == sorted(owned) for owned in slices)


@given(SIZES.filter(bool), st.integers(1, 9))
def test_no_rank_holds_more_than_the_mean_and_one_largest_group(sizes: list[int], world: int) -> None:
    loads = [sum(sizes[i] for i in owned) for owned in slice_groups(sizes, world)]
    assert max(loads) <= sum(sizes) / world + max(sizes)


def test_equal_groups_spread_evenly() -> None:
    assert slice_groups([10] * 6, 3) == ((0, 3), (1, 4), (2, 5))


@given(st.integers(0, 40), st.integers(1, 12))
def test_updates_cover_the_groups_in_order(num_groups: int, updates: int) -> None:
    runs = split_updates(num_groups, updates)
    assert len(runs) == updates
    assert [i for run in runs for i in run] == list(range(num_groups))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_an_unset_mini_batch_means_one_update() -> None:
    assert num_updates(256, None) == 1
    assert num_updates(256, 100) == 3


@given(SIZES, st.integers(1, 2000))
def test_micro_batches_keep_the_budget_unless_one_sequence_is_longer(sizes: list[int], budget: int) -> None:
    plan = pack(sizes, budget)
    assert sorted(i for batch in plan for i in batch) == list(range(len(sizes)))
    assert all(len(batch) == 1 or max(sizes[i] for i in batch) * len(batch) <= budget for batch in plan)


def row_costs(prompt: int, rows: tuple[tuple[int, ...], ...], responses: list[int], even_columns: int) -> list[float]:
    widths = [prompt + sum(responses[i] for i in row) for row in rows]
    return [width + width**2 / even_columns for width in widths]


@pytest.mark.parametrize(
    ("prompt", "responses", "rows"),
    [
        (23, [14] * 8, ((0, 1, 2, 3, 4, 5, 6, 7),)),  # the example: one row of 135
        (23, [14, 14, 160, 14], ((0, 1, 2, 3),)),  # a long one joins while little is there
        (23, [60, 160, 14], ((0, 2), (1,))),
        (1, [100, 100], ((0,), (1,))),  # a prompt of one token is cheaper computed again
        (1000, [2000] * 3, ((0,), (1,), (2,))),
        (10, [], ()),
    ],
)
def test_responses_share_a_row_where_that_is_cheaper(
    prompt: int, responses: list[int], rows: tuple[tuple[int, ...], ...]
) -> None:
    assert share_prompt(prompt, responses, 6 * 128) == rows


@given(st.integers(1, 3000), st.lists(st.integers(1, 3000), max_size=16), st.integers(1, 50_000))
def test_shared_rows_hold_each_response_once_and_cost_no_more_than_rows_of_one(
    prompt: int, responses: list[int], even_columns: int
) -> None:
    rows = share_prompt(prompt, responses, even_columns)
    assert sorted(i for row in rows for i in row) == list(range(len(responses)))
    alone = tuple((i,) for i in range(len(responses)))
    cost, apart = (sum(row_costs(prompt, plan, responses, even_columns)) for plan in (rows, alone))
    assert cost <= apart * (1 + 1e-9)


def test_a_plan_is_filled_with_empty_micro_batches() -> None:
    assert fill_to(((0, 1),), 3) == ((0, 1), (), ())
    with pytest.raises(ValueError, match="does not fit"):
        fill_to(((0,), (1,)), 1)
