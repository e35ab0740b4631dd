"""Sums of one-digit numbers whose running totals stay in 0..9, from reasoning-gym's chain_sum.

Three disjoint sets. A question of three or more terms belongs to exactly one of them, by a hash of its text, so the
sets stay disjoint whatever seeds they are drawn with. There are only 110 two-term questions: training and development
share them, the held-out set has none.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

# Weights of the numbers of terms. Longer sums are not learned by a model of this size in this time.
TERM_WEIGHTS = {2: 0.40, 3: 0.35, 4: 0.25}
TOTAL_MAX = 9  # with totals above one digit there are more facts to learn, and the warm-up takes longer

# How the questions of three and more terms are shared out, in percent. There are 1,210 of three terms: 30 % leaves
# enough of them for a held-out set of 512 distinct questions in the mix of TERM_WEIGHTS.
_HELDOUT_PERCENT = 30
_DEV_PERCENT = 10

_DRAWS_MAX = 2_000_000  # per number of terms; about 30,000 are needed
_SOURCE_SIZE = 10**7


class Split(Enum):
    """Which of the disjoint sets a question is in."""

    TRAIN = "train"
    DEV = "dev"  # decides when the warm-up ends
    HELDOUT = "heldout"  # never seen by warm-up or training


@dataclass(frozen=True, slots=True)
class Sum:
    """One task. `question` ends with the newline after which the model answers; `expression` is like `5 + 3 - 7`."""

    question: str
    answer: str
    expression: str

    @property
    def num_terms(self) -> int:
        return len(self.expression.split()) // 2 + 1


def draw(split: Split, seed: int, count: int, *, distinct: bool = False) -> list[Sum]:
    """`count` sums of `split`; equal arguments give equal sums. `distinct`: no question twice."""
    rng = random.Random(f"chain-sum {split.value} {seed}")
    weights = {n: w for n, w in TERM_WEIGHTS.items() if n > 2 or split is not Split.HELDOUT}
    sources = {n: _bounded(n, split, seed=rng.randrange(2**31)) for n in weights}
    seen: set[str] = set()
    sums: list[Sum] = []
    while len(sums) < count:
        num_terms = rng.choices(list(weights), list(weights.values()))[0]
        item = next(sources[num_terms])
        while distinct and item.question in seen:
            item = next(sources[num_terms])
        seen.add(item.question)
        sums.append(item)
    return sums


def split_of(question: str, num_terms: int) -> frozenset[Split]:
    """The sets that may use this question: one, but two for the few two-term questions."""
    if num_terms == 2:
        return frozenset({Split.TRAIN, Split.DEV})
    bucket = int.from_bytes(hashlib.sha256(question.encode()).digest()[:4], "big") % 100
    if bucket < _HELDOUT_PERCENT:
        return frozenset({Split.HELDOUT})
    return frozenset({Split.DEV if bucket < _HELDOUT_PERCENT + _DEV_PERCENT else Split.TRAIN})


def running_totals(expression: str) -> list[int]:
    """The totals after each term: `5 + 3 - 7` gives 5, 8, 1."""
    first, *rest = expression.split()
    totals = [int(first)]
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        totals.append(totals[-1] + int(term) if operator == "+" else totals[-1] - int(term))
    return totals


def _bounded(num_terms: int, split: Split, seed: int) -> Iterator[Sum]:
    """The sums of this many terms that stay in bounds and belong to `split`, in the source's order."""
    # Somebody else's files say so when they are compiled, and a first run would begin with it.
    warnings.filterwarnings("ignore", '"is" with', SyntaxWarning)
    import reasoning_gym  # slow to import (1.7 CPU-s): only where it is used

    library: Any = reasoning_gym  # without types
    source = library.create_dataset(
        "chain_sum", min_terms=num_terms, max_terms=num_terms, min_digits=1, max_digits=1, size=_SOURCE_SIZE, seed=seed
    )
    for index in range(_DRAWS_MAX):
        raw: dict[str, Any] = source[index]
        item = Sum(str(raw["question"]) + "\n", str(raw["answer"]), str(raw["metadata"]["expression"]))
        in_bounds = all(0 <= total <= TOTAL_MAX for total in running_totals(item.expression))
        if in_bounds and split in split_of(item.question, num_terms):
            yield item
    raise ValueError(f"too few {split.value} sums of {num_terms} terms: {_DRAWS_MAX} draws were not enough")
