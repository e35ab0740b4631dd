"""Sums of two one-digit numbers as questions for a chat model.

The held-out pairs appear in neither order in training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

_HELDOUT_PAIRS = 16  # of 55 unordered ones
_PHRASINGS = (
    "What is {a} + {b}? Answer with just the number.",
    "Add {a} and {b}. Answer with just the number.",
    "{a} plus {b} equals what? Answer with just the number.",
)
_PARTITION_SEED = 0  # the same pairs are held out whatever seed orders the rows


def rows(seed: int, *, heldout: bool) -> Iterator[dict[str, object]]:
    """Every question of the set once, in an order given by `seed`; the held-out set has one phrasing only.

    `prompt` is the chat message list, `question` its text alone.
    """
    pairs = [(a, b) for a in range(10) for b in range(a, 10)]
    held = set(random.Random(_PARTITION_SEED).sample(pairs, _HELDOUT_PAIRS))
    chosen = [pair for pair in pairs if (pair in held) == heldout]
    ordered = sorted({order for a, b in chosen for order in ((a, b), (b, a))})
    phrasings = _PHRASINGS[:1] if heldout else _PHRASINGS  # a model of this size takes seconds for each question
    questions = [(phrasing.format(a=a, b=b), a + b) for phrasing in phrasings for a, b in ordered]
    random.Random(f"one-digit-sums {seed}").shuffle(questions)
    for question, answer in questions:
        yield {"question": question, "prompt": [{"role": "user", "content": question}], "answer": str(answer)}
