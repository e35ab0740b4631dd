"""What the pool keeps of committed steps in memory: sums of all, and only as many rows as a rollback may take away."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.pool.history import TAIL_STEPS, StepHistory
from laminar.wire.messages import StepRow


def row(step: int, attempt: int = 1) -> StepRow:
    return StepRow(
        step=step, attempt=attempt, version=step, wall_s=float(step), reward_mean=step / 10 + attempt, num_samples=4,
        response_tokens=step + attempt, inherent={step % 3: 3, 7: 1}, consumed={attempt: 4}, stats={"loss": 0.5},
    )  # fmt: skip


def grown(num_steps: int, final_step: int = 0) -> StepHistory:
    return StepHistory.read((row(step) for step in range(1, num_steps + 1)), final_step)


def slow(rows: list[StepRow]) -> tuple[dict[int, int], dict[int, int], int, list[float]]:
    inherent, consumed = Counter[int](), Counter[int]()
    for each in rows:
        inherent.update(each.inherent)
        consumed.update(each.consumed)
    return dict(inherent), dict(consumed), sum(r.response_tokens for r in rows), [r.reward_mean for r in rows]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), max_size=12))
def test_sums_are_those_of_the_surviving_rows_after_any_rollbacks(phases: list[tuple[int, int]]) -> None:
    history, rows = StepHistory(), list[StepRow]()
    for attempt, (num_steps, back) in enumerate(phases, 1):
        for _ in range(num_steps):
            rows.append(row(len(rows) + 1, attempt))
            history.add(rows[-1], final_step=0)
        rows = rows[: max(0, len(rows) - back)]
        history.forget_after(len(rows))
        inherent, consumed, tokens, rewards = slow(rows)
        assert (history.inherent.counts, history.consumed.counts) == (inherent, consumed)
        assert (history.response_tokens, history.reward_curve(10_000)) == (tokens, rewards)
        assert history.last == (rows[-1] if rows else None)
        assert history.after(0, 10_000) == rows


def test_rows_far_below_the_last_final_step_are_left_to_the_store() -> None:
    num_steps, final = 5 * TAIL_STEPS, 4 * TAIL_STEPS
    history = StepHistory()
    for step in range(1, num_steps + 1):
        history.add(row(step), final_step=max(0, step - TAIL_STEPS))
    assert history.after(3 * TAIL_STEPS - 1, 10) is None and history.after(0, 10) is None
    newest = history.after(3 * TAIL_STEPS, num_steps)
    assert newest is not None and [each.step for each in newest] == list(range(3 * TAIL_STEPS + 1, num_steps + 1))
    assert history.response_tokens == sum(row(step).response_tokens for step in range(1, num_steps + 1))
    assert len(history.reward_curve(100)) <= 101 and history.reward_curve(100)[0] == row(1).reward_mean
    history.forget_after(final)
    assert history.last is not None and history.last.step == final, "something is left to show after every rollback"


def test_final_steps_cannot_be_taken_back() -> None:
    history = grown(3 * TAIL_STEPS, final_step=2 * TAIL_STEPS)
    with pytest.raises(ValueError, match="final"):
        history.forget_after(TAIL_STEPS - 1)


def test_a_page_holds_no_more_than_was_asked_for() -> None:
    history = grown(30)
    page = history.after(10, 5)
    assert page is not None and [each.step for each in page] == [11, 12, 13, 14, 15]
    assert history.after(30, 5) == [] and history.after(-1, 1) == [row(1)]
