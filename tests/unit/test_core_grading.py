"""A reward that always fails is told apart from responses that are hard to grade."""

from __future__ import annotations

from laminar.core.grading import MAX_UNGRADED_IN_A_ROW, GradingWatch


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
