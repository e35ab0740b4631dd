"""How a batch of groups becomes the work of ranks, updates and micro-batches, and what a group's rewards are worth.

A batch is a list of groups (all samples of one prompt). It is cut three times, between groups until the last cut:

    batch --slice_groups--> ranks --split_updates--> updates (one optimizer step each) --pack--> micro-batches

`share_prompt` cuts a group into the rows of those micro-batches: its responses may share one row and one prompt.
Every function is pure and sees only sizes in tokens; the order of a batch is the sealed order and is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdvantageRule:
    """advantage = (reward - mean) / (standard deviation + epsilon), over the graded samples of one group."""

    unbiased: bool
    """True: divide the squares by n - 1; False: by n."""
    epsilon: float
    keep_equal: bool
    """True: a group of equal rewards stays in, with advantage 0. False: it has no advantages and leaves the loss."""


LAMINAR_ADVANTAGES = AdvantageRule(unbiased=False, epsilon=1e-6, keep_equal=False)
TRL_ADVANTAGES = AdvantageRule(unbiased=True, epsilon=1e-4, keep_equal=True)
"""What TRL 1.16 does; used by the tests that compare with its numbers."""


def advantages(rewards: Sequence[float], rule: AdvantageRule = LAMINAR_ADVANTAGES) -> tuple[float, ...] | None:
    """One advantage a reward; None: the group is consumed, but stays out of the loss and of its denominator.

    Raises ValueError for fewer than two rewards or one that is not finite.
    """
    if len(rewards) < 2:
        raise ValueError(f"a group needs at least 2 graded samples, got {len(rewards)}")
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    if max(rewards) == min(rewards):
        # Compared exactly: the mean of equal numbers may differ from them by a rounding error.
        return (0.0,) * len(rewards) if rule.keep_equal else None
    mean = math.fsum(rewards) / len(rewards)
    squares = math.fsum((reward - mean) ** 2 for reward in rewards)
    deviation = math.sqrt(squares / (len(rewards) - 1 if rule.unbiased else len(rewards)))
    return tuple((reward - mean) / (deviation + rule.epsilon) for reward in rewards)


def slice_groups(num_tokens: Sequence[int], world: int) -> tuple[tuple[int, ...], ...]:
    """For each rank the indexes of its groups, ascending; `num_tokens[i]` is the size of group i.

    Largest group first to the rank with the fewest tokens (then the fewest groups, then the lowest number): the
    fullest rank holds at most 4/3 of the best possible (Graham's bound). Same input, same answer on every host.
    """
    if world < 1:
        raise ValueError(f"world must be at least 1, got {world}")
    loads = [0] * world
    owned: list[list[int]] = [[] for _ in range(world)]
    for index in sorted(range(len(num_tokens)), key=lambda i: (-num_tokens[i], i)):
        rank = min(range(world), key=lambda r: (loads[r], len(owned[r]), r))
        loads[rank] += num_tokens[index]
        owned[rank].append(index)
    return tuple(tuple(sorted(indexes)) for indexes in owned)


def num_updates(num_samples_total: int, mini_batch_trajectories: int | None) -> int:
    """Optimizer updates of one step; the same on every rank, because it depends on the whole batch only."""
    if mini_batch_trajectories is None or num_samples_total == 0:
        return 1
    return math.ceil(num_samples_total / mini_batch_trajectories)


def split_updates(num_groups: int, updates: int) -> tuple[range, ...]:
    """Consecutive runs of a rank's groups, one an update; sizes differ by at most one, and some may be empty."""
    if updates < 1:
        raise ValueError(f"updates must be at least 1, got {updates}")
    return tuple(range(num_groups * u // updates, num_groups * (u + 1) // updates) for u in range(updates))


def share_prompt(prompt: int, responses: Sequence[int], even_columns: int) -> tuple[tuple[int, ...], ...]:
    """Rows of one group: indexes of the responses that follow the same copy of the prompt, in order.

    `prompt` and `responses` are lengths in tokens; a row of W tokens costs W + W^2 / even_columns, because attention
    in a row is computed for all its columns: `even_columns` is the width at which it costs as much as the rest of the
    model. A response of n tokens joins a row that holds r response tokens while that is cheaper than a row of its own:
    2 n r < prompt (even_columns + prompt).
    """
    rows: list[list[int]] = []
    held: list[int] = []
    gain = prompt * (even_columns + prompt)
    for index, length in enumerate(responses):
        for row, tokens in enumerate(held):
            if 2 * length * tokens < gain:
                rows[row].append(index)
                held[row] += length
                break
        else:
            rows.append([index])
            held.append(length)
    return tuple(map(tuple, rows))


def pack(num_tokens: Sequence[int], budget_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batches: indexes of sequences whose padded size (longest x count) is within the budget.

    Sorted by length, so that little is padding. A sequence above the budget is alone in its micro-batch.
    """
    if budget_tokens < 1:
        raise ValueError(f"budget_tokens must be at least 1, got {budget_tokens}")
    plan: list[tuple[int, ...]] = []
    current: list[int] = []
    for index in sorted(range(len(num_tokens)), key=lambda i: (num_tokens[i], i)):
        if current and num_tokens[index] * (len(current) + 1) > budget_tokens:
            plan.append(tuple(current))
            current = []
        current.append(index)
    if current:
        plan.append(tuple(current))
    return tuple(plan)


def fill_to(plan: Sequence[tuple[int, ...]], count: int) -> tuple[tuple[int, ...], ...]:
    """The plan with empty micro-batches appended up to `count`: ranks that share collectives must run equally many."""
    if len(plan) > count:
        raise ValueError(f"a plan of {len(plan)} micro-batches does not fit {count}")
    return (*plan, *((),) * (count - len(plan)))
