"""The data recipes: what is promised about the sums, and about what is held out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from laminar.recipes import one_digit_sums
from laminar.recipes.chain_sum import TOTAL_MAX, Split, Sum, draw, running_totals

COUNT = 600


@pytest.fixture(scope="module")
def train() -> list[Sum]:
    return draw(Split.TRAIN, 0, COUNT)


@pytest.fixture(scope="module")
def heldout() -> list[Sum]:
    return draw(Split.HELDOUT, 0, 512, distinct=True)


@pytest.fixture(scope="module")
def dev() -> list[Sum]:
    return draw(Split.DEV, 0, 256)


def questions(sums: list[Sum], *, min_terms: int) -> set[str]:
    return {item.question for item in sums if item.num_terms >= min_terms}


def test_every_running_total_is_one_digit(train: list[Sum], dev: list[Sum], heldout: list[Sum]) -> None:
    for item in [*train, *dev, *heldout]:
        assert all(0 <= total <= TOTAL_MAX for total in running_totals(item.expression)), item


def test_the_answer_is_the_last_running_total(train: list[Sum], heldout: list[Sum]) -> None:
    for item in [*train, *heldout]:
        assert item.answer == str(running_totals(item.expression)[-1]), item


def test_a_question_holds_its_expression_and_ends_with_a_newline(train: list[Sum]) -> None:
    for item in train:
        assert item.expression in item.question and item.question.endswith("=\n"), item


def test_the_heldout_set_is_distinct_sums_of_three_and_more_terms(heldout: list[Sum]) -> None:
    assert len(questions(heldout, min_terms=3)) == len(heldout) == 512


@pytest.mark.parametrize("seed", [0, 1])
def test_train_dev_and_heldout_share_no_longer_sum_whatever_their_seeds(heldout: list[Sum], seed: int) -> None:
    train = questions(draw(Split.TRAIN, seed, COUNT), min_terms=3)
    dev = questions(draw(Split.DEV, seed + 1, 256), min_terms=3)
    assert not train & dev
    assert not (train | dev) & questions(heldout, min_terms=2)


def test_numbers_of_terms_follow_their_weights(train: list[Sum]) -> None:
    shares = [sum(item.num_terms == n for item in train) / len(train) for n in (2, 3, 4)]
    assert shares == pytest.approx([0.40, 0.35, 0.25], abs=0.07)  # over three standard deviations at 600


def test_equal_seeds_give_equal_sums_and_others_do_not(train: list[Sum]) -> None:
    assert draw(Split.TRAIN, 0, COUNT) == train
    assert draw(Split.TRAIN, 1, COUNT) != train


def test_data_is_made_without_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from laminar.recipes.catalog import RECIPES, Order;"
        "RECIPES['chain-sum-heldout'].build(Order(Path(sys.argv[1]), 0, 1, print)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60, check=True)


def test_heldout_pairs_of_one_digit_sums_appear_in_training_in_neither_order() -> None:
    def pairs(heldout: bool) -> set[frozenset[str]]:
        rows = one_digit_sums.rows(0, heldout=heldout)
        return {frozenset(c for c in str(row["question"]).split("?")[0] if c.isdigit()) for row in rows}

    assert pairs(heldout=True) and not pairs(heldout=True) & pairs(heldout=False)


def test_a_one_digit_sum_is_one_user_message_with_its_sum_as_answer() -> None:
    for row in one_digit_sums.rows(3, heldout=False):
        digits = [int(c) for c in str(row["question"]) if c.isdigit()]
        assert row["prompt"] == [{"role": "user", "content": row["question"]}]
        assert row["answer"] == str(sum(digits[-2:]))
