"""A reward that always fails is told apart from responses that are hard to grade."""

from __future__ import annotations

from laminar.core.grading import (
    HANGS_IN_A_ROW,
    MAX_UNGRADED_IN_A_ROW,
    NUM_TRIES,
    WARN_UNGRADED_IN_A_ROW,
    GradingWatch,
    TryBudget,
)


def give_up(watch: GradingWatch, times: int) -> None:
    for _ in range(times):
        watch.observe(graded=False, detail="KeyError: 'api key'")


def test_a_row_of_ungraded_responses_breaks_the_reward_and_names_the_latest_failure() -> None:
    watch = GradingWatch()
    give_up(watch, MAX_UNGRADED_IN_A_ROW - 1)
    assert not watch.broken
    give_up(watch, 1)
    assert "32 responses in a row" in watch.broken and "KeyError: 'api key'" in watch.broken


def test_one_graded_response_shows_that_the_reward_works() -> None:
    watch = GradingWatch()
    for _ in range(10):
        give_up(watch, MAX_UNGRADED_IN_A_ROW - 1)
        watch.observe(graded=True, detail="")
    assert not watch.broken
    assert watch.condition.startswith("310 responses were left out")


def test_without_a_failure_there_is_nothing_to_say() -> None:
    watch = GradingWatch()
    watch.observe(graded=True, detail="")
    assert (watch.broken, watch.condition) == ("", "")


def test_a_row_of_failures_is_warned_of_once_with_its_counts() -> None:
    watch = GradingWatch()
    give_up(watch, 3)
    watch.observe(graded=True, detail="")
    give_up(watch, WARN_UNGRADED_IN_A_ROW - 1)
    assert not watch.take_warning()
    give_up(watch, 1)
    warning = watch.take_warning()
    assert warning.startswith("8 responses in a row could not be graded (11 in all)")
    assert "KeyError: 'api key'" in warning and "At 32 in a row the job fails" in warning
    give_up(watch, 5)
    assert not watch.take_warning(), "said already"
    watch.observe(graded=True, detail="")
    watch.take_warning()
    give_up(watch, WARN_UNGRADED_IN_A_ROW)
    assert watch.take_warning(), "another row"


def test_a_reward_that_only_hangs_gets_one_try_a_response_until_a_try_ends_in_time() -> None:
    budget = TryBudget()
    for _ in range(HANGS_IN_A_ROW - 1):
        budget.observe(hung=True)
    assert budget.num_tries == NUM_TRIES
    budget.observe(hung=True)
    assert budget.num_tries == 1
    budget.observe(hung=False)
    assert budget.num_tries == NUM_TRIES


def test_a_reward_that_hangs_now_and_then_keeps_its_tries() -> None:
    budget = TryBudget()
    for index in range(100):
        budget.observe(hung=index % HANGS_IN_A_ROW != 0)
        assert budget.num_tries == NUM_TRIES
