"""Rewards as pure functions."""

from __future__ import annotations

import math
from typing import Any

import pytest

from laminar.rollout.rewards import RewardRule, checked, combined, exact, extract, rule_of
from laminar.wire.spec import Extract, Reward, RewardType


def rule(**changes: Any) -> RewardRule:
    fields: dict[str, Any] = {"name": "answer", "type": RewardType.EXACT, "weight": 1.0, "timeout_s": 5.0} | changes
    return RewardRule(**fields)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5+3=8;<answer>8</answer>", "8"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1</answer> or <answer>2", "1"),
        ("<answer><answer>3</answer>", "3"),
        ("</answer>4<answer>", None),
        ("8", None),
    ],
)
def test_a_tag_gives_the_text_of_the_last_closed_pair(text: str, expected: str | None) -> None:
    assert extract(rule(tag="answer"), text) == expected


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [(r"#### (\d+)", "#### 1 #### 23", "23"), (r"\d+", "7 and 42", "42"), (r"#### (\d+)", "none", None)],
)
def test_a_regex_gives_the_first_group_of_the_last_match(pattern: str, text: str, expected: str | None) -> None:
    assert extract(rule(regex=pattern), text) == expected


def test_without_an_extract_the_whole_response_counts() -> None:
    assert extract(rule(), " all of it ") == " all of it "


def test_exact_ignores_white_space_around_the_text_only() -> None:
    assert (exact(" 8\n", "8"), exact("8 0", "80")) == (1.0, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1"])
def test_what_is_no_finite_number_is_no_reward(value: object) -> None:
    with pytest.raises(ValueError, match="not a finite number"):
        checked(value)


def test_the_reward_is_the_weighted_sum_of_its_parts() -> None:
    rules = [rule(), rule(name="format", weight=-0.5)]
    assert combined(rules, {"answer": 1.0, "format": 1.0}) == 0.5


def test_a_rule_says_what_the_job_says() -> None:
    reward = Reward(name="a", type=RewardType.MATH, weight=2, extract=Extract(tag="answer"), timeout_seconds=3)
    assert rule_of(reward) == rule(name="a", type=RewardType.MATH, weight=2.0, tag="answer", timeout_s=3.0)
