"""The adaptive warm-up: supervised steps until the model is good enough for reinforcement learning, and no further.

    ramp (20 steps) -> constant rate -> from step 150 look every 50 steps -> greedy >= 0.7 -> linear decay (60 steps)

The number of steps is never fixed: it differs between seeds by a factor of two, and reinforcement learning from a weak
start stays weak.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer

from laminar.recipes.chain_sum import Sum
from laminar.recipes.demonstrations import Noise, demonstrate
from laminar.recipes.errors import RecipeError
from laminar.recipes.model import CausalLM
from laminar.recipes.sampler import respond
from laminar.recipes.tokenizer import ANSWER_CLOSE, ANSWER_OPEN, EOS

_PASS_TOKENS = 80  # what a forward and backward pass costs beside its tokens (7 ms), in tokens (85 us each)
_SAMPLING_SEED = 7


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The schedule. AdamW (0.9, 0.95) without weight decay; rates are per step, sizes in demonstrations."""

    batch: int = 32
    learning_rate: float = 3e-3
    ramp_steps: int = 20
    clip_norm: float = 1.0
    first_look_step: int = 150
    look_every_steps: int = 50
    greedy_goal: float = 0.7
    decay_steps: int = 60
    max_steps: int = 3000  # four times what a slow seed has needed
    max_response_tokens: int = 160  # as the example job's limit

    def rate(self, step: int, goal_step: int | None) -> float:
        """The learning rate at `step` (from 0); `goal_step` is where the goal was reached, if it was."""
        if goal_step is None:
            return self.learning_rate * min(1.0, (step + 1) / self.ramp_steps)
        return self.learning_rate * max(0.05, 1.0 - (step - goal_step) / self.decay_steps)

    def looks_at(self, step: int) -> bool:
        return step >= self.first_look_step and step % self.look_every_steps == 0


@dataclass(frozen=True, slots=True)
class Score:
    """Fractions of right, ended responses, and the lengths of the sampled ones in tokens, ascending."""

    sampled: float
    greedy: float
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids of one demonstration; only the response (with its end) is learned."""

    prompt: list[int]
    response: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def warm_up(
    model: CausalLM,
    tokenizer: Tokenizer,
    *,
    train: Sequence[Sum],
    dev: Sequence[Sum],
    seed: int,
    schedule: WarmUp,
    report: Callable[[str], None],
) -> int:
    """Trains `model` in place until the schedule ends; returns the number of steps.

    Equal seeds draw equal examples; the weights are equal as far as floating point is on the machine.

    Raises RecipeError if the goal is not reached in `schedule.max_steps`.
    """
    rng = random.Random(f"warm-up {seed}")
    optimizer: Any = torch.optim.AdamW(
        model.parameters(), lr=schedule.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    goal_step: int | None = None
    for step in range(schedule.max_steps):
        if goal_step is None and schedule.looks_at(step):
            score = evaluate(model, tokenizer, dev, schedule.max_response_tokens)
            report(f"warm-up step {step}: sampled {score.sampled:.2f} greedy {score.greedy:.2f}")
            if score.greedy >= schedule.greedy_goal:
                goal_step = step
        if goal_step is not None and step >= goal_step + schedule.decay_steps:
            return step
        examples = [_example(tokenizer, rng.choice(train), rng) for _ in range(schedule.batch)]
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step, goal_step)
        loss = _backward(model, examples)
        torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if not schedule.looks_at(step) and step % schedule.look_every_steps == 0:
            report(f"warm-up step {step}: loss {loss:.2f}")
    raise RecipeError(
        f"The warm-up of the tiny model did not reach greedy {schedule.greedy_goal} in {schedule.max_steps} steps"
        f" (seed {seed}). Another --seed is likely to; please report this one."
    )


def evaluate(model: CausalLM, tokenizer: Tokenizer, sums: Sequence[Sum], max_response_tokens: int) -> Score:
    """Scores the model on `sums`. The sampled score uses the same random numbers at each call."""
    prompts = [tokenizer.encode(item.question).ids for item in sums]
    generator = torch.Generator().manual_seed(_SAMPLING_SEED)
    sampled = respond(model, prompts, max_tokens=max_response_tokens, generator=generator)
    greedy = respond(model, prompts, max_tokens=max_response_tokens, generator=None)
    return Score(
        sampled=_fraction_right(tokenizer, sums, sampled),
        greedy=_fraction_right(tokenizer, sums, greedy),
        lengths=tuple(sorted(len(response) for response in sampled)),
    )


def is_right(tokenizer: Tokenizer, item: Sum, response: Sequence[int]) -> bool:
    """True if the response ended by itself and its last tagged answer is the sum's. Tags are special tokens."""
    if not response or response[-1] != tokenizer.token_to_id(EOS):
        return False
    _, opened, rest = tokenizer.decode(list(response), skip_special_tokens=False).rpartition(ANSWER_OPEN)
    answer, closed, _ = rest.partition(ANSWER_CLOSE)
    return bool(opened and closed) and answer.strip() == item.answer


def _fraction_right(tokenizer: Tokenizer, sums: Sequence[Sum], responses: Sequence[Sequence[int]]) -> float:
    right = [is_right(tokenizer, item, response) for item, response in zip(sums, responses, strict=True)]
    return sum(right) / len(right)


def _example(tokenizer: Tokenizer, item: Sum, rng: random.Random) -> Example:
    response = demonstrate(item.expression, rng, Noise())
    return Example(tokenizer.encode(item.question).ids, tokenizer.encode(response + EOS).ids)


def _backward(model: CausalLM, examples: Sequence[Example]) -> float:
    """Adds the gradient of the mean loss per response token of the whole batch; returns that loss."""
    num_learned = sum(len(example.response) for example in examples)
    loss_sum = 0.0
    for micro_batch in _micro_batches(examples):
        tokens, targets = _tensors(micro_batch)
        # Right padding under a causal mask: no real token sees the padding, so no mask is needed.
        hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        learned = targets >= 0
        logits = model.get_output_embeddings()(hidden[learned])
        loss: Any = torch.nn.functional.cross_entropy(logits, targets[learned], reduction="sum") / num_learned
        loss.backward()
        loss_sum += loss.item()
    return loss_sum


def _micro_batches(examples: Sequence[Example]) -> list[list[Example]]:
    """The examples by length, cut where padded tokens plus passes cost least (shortest path over the cuts).

    Lengths have a long tail: in one batch, two fifths of the tokens would be padding.
    """
    by_length = sorted(examples, key=len)
    cost = [0] * (len(by_length) + 1)  # of the first `end` examples, in tokens
    cut = [0] * (len(by_length) + 1)
    for end in range(1, len(by_length) + 1):
        longest = len(by_length[end - 1])
        cost[end], cut[end] = min((cost[start] + (end - start) * longest + _PASS_TOKENS, start) for start in range(end))
    batches: list[list[Example]] = []
    end = len(by_length)
    while end > 0:
        batches.append(by_length[cut[end] : end])
        end = cut[end]
    return batches


def _tensors(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and, at each position, the next token if it is to be learned, else -1; both `[rows, tokens]`."""
    longest = max(len(example) for example in examples)
    tokens = torch.zeros(len(examples), longest, dtype=torch.long)
    targets = torch.full((len(examples), longest), -1)
    for row, example in enumerate(examples):
        tokens[row, : len(example)] = torch.tensor(example.prompt + example.response)
        targets[row, len(example.prompt) - 1 : len(example) - 1] = torch.tensor(example.response)
    return tokens, targets
