"""What the warm-up shows the model: worked running totals, made imperfect on purpose.

`5 + 3 - 7` becomes `5+3=8-7=1;<answer>1</answer>`. A step is sometimes wrong, which leaves something for reinforcement
learning to remove, and sometimes starts a loop that writes the step again, which gives lengths a tail.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from laminar.recipes.chain_sum import TOTAL_MAX


@dataclass(frozen=True, slots=True)
class Noise:
    """Chances per step of a demonstration: to be wrong, to enter the re-check loop, and to leave it at each turn."""

    wrong: float = 0.25
    recheck: float = 0.05
    recheck_stop: float = 0.22


def demonstrate(expression: str, rng: random.Random, noise: Noise) -> str:
    """A worked answer. A wrong step is carried on from, so the answer fits the steps and not the question."""
    first, *rest = expression.split()
    total, worked = int(first), first
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(term) if operator == "+" else total - int(term)
        if rng.random() < noise.wrong:
            result = _near_miss(result, rng)
        worked += f"{operator}{term}={result}"
        if rng.random() < noise.recheck:
            worked += f"?{total}{operator}{term}={result}"
            while rng.random() >= noise.recheck_stop:
                worked += f"?{total}{operator}{term}={result}"
        total = result
    return f"{worked};<answer>{total}</answer>"


def _near_miss(result: int, rng: random.Random) -> int:
    """A total in bounds that is one or two off; after an earlier wrong step `result` itself may be out of bounds."""
    bounded = max(0, min(TOTAL_MAX, result))
    return rng.choice([bounded + off for off in (-2, -1, 1, 2) if 0 <= bounded + off <= TOTAL_MAX])
