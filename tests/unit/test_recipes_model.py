"""The tiny model's folder: one tokenization for every loader, a right idea of a right answer, a warm-up that ends."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from laminar.recipes import arithmetic_tiny
from laminar.recipes.chain_sum import Split, Sum, draw, running_totals
from laminar.recipes.demonstrations import Noise, demonstrate
from laminar.recipes.errors import RecipeError
from laminar.recipes.model import new_model
from laminar.recipes.sampler import respond
from laminar.recipes.tokenizer import EOS
from laminar.recipes.warmup import WarmUp, is_right

# The real schedule takes minutes; this one looks once and is content with anything.
SMOKE = WarmUp(batch=4, first_look_step=2, look_every_steps=2, greedy_goal=0.0, decay_steps=3, max_response_tokens=6)


@pytest.fixture(scope="module")
def train() -> list[Sum]:
    return draw(Split.TRAIN, 0, 64)


def smoke_build(folder: Path, train: Sequence[Sum], schedule: WarmUp = SMOKE) -> list[str]:
    lines: list[str] = []
    arithmetic_tiny.build(
        folder,
        train=train,
        dev=train[:8],
        heldout=train[:8],
        seed=5,
        threads=1,
        report=lines.append,
        schedule=schedule,
    )
    return lines


@pytest.fixture(scope="module")
def folder(train: list[Sum], tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("tiny")
    smoke_build(built, train)
    return built


def test_three_loaders_of_the_folder_give_the_same_ids(folder: Path, train: list[Sum]) -> None:
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    auto: Any = AutoTokenizer.from_pretrained(folder)
    fast: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    rng = random.Random(0)
    for item in train:
        text = item.question + demonstrate(item.expression, rng, Noise(recheck=0.5)) + EOS
        ids = plain.encode(text).ids
        assert ids == auto(text).input_ids == fast(text).input_ids
        assert text == plain.decode(ids, skip_special_tokens=False) == auto.decode(ids)


def test_the_end_of_sequence_is_the_same_id_everywhere(folder: Path) -> None:
    eos = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(EOS)
    auto: Any = AutoTokenizer.from_pretrained(folder)
    configs = [json.loads((folder / name).read_text()) for name in ("config.json", "generation_config.json")]
    assert {eos, auto.eos_token_id} == {config["eos_token_id"] for config in configs}


def test_the_saved_weights_load_as_an_ordinary_causal_model(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert 600_000 < model.num_parameters() < 660_000


def test_digits_and_operators_are_single_tokens(train: list[Sum]) -> None:
    tokenizer = arithmetic_tiny.tokenizer_for(train, seed=0)
    assert tokenizer.encode("5+3=8-7=1;<answer>1</answer>").tokens == [*"5+3=8-7=1;", "<answer>", "1", "</answer>"]


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("5+3=8;<answer>8</answer><eos>", True),
        ("<answer>7</answer><answer>8</answer><eos>", True),
        ("5+3=8;<answer>8</answer>", False),
        ("5+3=8;<answer>9</answer><eos>", False),
        ("8<eos>", False),
        ("<answer>8<eos>", False),
    ],
)
def test_only_an_ended_response_with_the_right_tagged_answer_is_right(
    train: list[Sum], response: str, right: bool
) -> None:
    tokenizer = arithmetic_tiny.tokenizer_for(train, seed=0)
    item = Sum("5 + 3 =\n", "8", "5 + 3")
    assert is_right(tokenizer, item, tokenizer.encode(response).ids) == right


def test_the_sampler_agrees_with_a_full_forward_pass_of_each_prefix(train: list[Sum]) -> None:
    tokenizer = arithmetic_tiny.tokenizer_for(train, seed=0)
    model = new_model(tokenizer, seed=0)
    prompts = [tokenizer.encode(item.question).ids for item in train[:6]]
    for prompt, response in zip(prompts, respond(model, prompts, max_tokens=5, generator=None), strict=True):
        for end in range(len(response)):
            logits = model(input_ids=torch.tensor([prompt + response[:end]])).logits[0, -1]
            assert response[end] == int(logits.argmax())


def test_demonstrations_without_noise_are_the_running_totals() -> None:
    text = demonstrate("5 + 3 - 7", random.Random(0), Noise(wrong=0, recheck=0))
    assert text == "5+3=8-7=1;<answer>1</answer>"
    assert running_totals("5 + 3 - 7") == [5, 8, 1]


def test_the_warm_up_ends_its_decay_after_the_goal_and_reports_each_look(train: list[Sum], tmp_path: Path) -> None:
    lines = smoke_build(tmp_path, train)
    assert [line.split(":")[0] for line in lines] == ["warm-up step 0", "warm-up step 2", "warm-up done in 5 steps"]
    assert json.loads((tmp_path / arithmetic_tiny.MEASURES_FILE).read_text())["steps"] == 5


def test_equal_seeds_give_equal_weights_but_for_rounding(folder: Path, train: list[Sum], tmp_path: Path) -> None:
    smoke_build(tmp_path, train)
    first, second = (load_file(built / "model.safetensors") for built in (folder, tmp_path))
    assert first.keys() == second.keys()
    for name, weights in first.items():
        torch.testing.assert_close(second[name], weights, rtol=0, atol=1e-3)  # five steps move weights by 5e-3


def test_a_goal_that_is_never_reached_is_an_error_and_not_a_weak_model(train: list[Sum], tmp_path: Path) -> None:
    unreachable = WarmUp(
        batch=2, first_look_step=1, look_every_steps=2, greedy_goal=1.1, max_steps=4, max_response_tokens=6
    )
    with pytest.raises(RecipeError, match="did not reach greedy 1.1 in 4 steps"):
        smoke_build(tmp_path, train, unreachable)
    assert list(tmp_path.iterdir()) == []
