"""The recipe `arithmetic-tiny`: tokenizer, model, adaptive warm-up, folder."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from laminar.recipes.chain_sum import Sum
from laminar.recipes.demonstrations import Noise, demonstrate
from laminar.recipes.model import new_model, save_model
from laminar.recipes.tokenizer import train_tokenizer
from laminar.recipes.warmup import Score, WarmUp, evaluate, warm_up

_TOKENIZER_TEXTS = 2000  # its words are few: more texts change no merge
MEASURES_FILE = "warmup.json"


def build(
    folder: Path,
    *,
    train: Sequence[Sum],
    dev: Sequence[Sum],
    heldout: Sequence[Sum],
    seed: int,
    threads: int,
    report: Callable[[str], None],
    schedule: WarmUp,
) -> None:
    """Fills `folder` with the model and a record of its warm-up. `heldout` is only measured, once, at the end."""
    torch.set_num_threads(threads)
    tokenizer = tokenizer_for(train[:_TOKENIZER_TEXTS], seed)
    model = new_model(tokenizer, seed)
    steps = warm_up(model, tokenizer, train=train, dev=dev, seed=seed, schedule=schedule, report=report)
    score = evaluate(model, tokenizer, heldout, schedule.max_response_tokens)
    report(f"warm-up done in {steps} steps: held out sampled {score.sampled:.2f} greedy {score.greedy:.2f}")
    save_model(model, tokenizer, folder)
    (folder / MEASURES_FILE).write_text(json.dumps(_measures(steps, score)) + "\n")


def tokenizer_for(sums: Sequence[Sum], seed: int) -> Tokenizer:
    """A tokenizer of the task's own text: questions with worked answers."""
    rng = random.Random(f"tokenizer {seed}")
    return train_tokenizer(item.question + demonstrate(item.expression, rng, Noise()) for item in sums)


def _measures(steps: int, score: Score) -> dict[str, object]:
    """Scores on the held-out set, and percentiles of the sampled lengths in tokens."""
    lengths = {f"p{percent}": score.lengths[len(score.lengths) * percent // 100] for percent in (50, 90, 99)}
    return {
        "steps": steps,
        "heldout_sampled": score.sampled,
        "heldout_greedy": score.greedy,
        "response_tokens": {**lengths, "max": score.lengths[-1]},
    }
