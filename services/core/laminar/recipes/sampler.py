"""Responses of a transformers model to many prompts, for the warm-up's own evaluation.

Prompts of one length go through the model together, in lock step and without padding; a row that has ended leaves the
batch and its cache. So the whole is exact, and a few long responses cost only themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import DynamicCache

from laminar.recipes.model import CausalLM


def respond(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    generator: torch.Generator | None,
) -> list[list[int]]:
    """One response per prompt, in order: sampled at T = 1 with `generator`, greedy without.

    A response ends with the end-of-sequence token, or is `max_tokens` long and has none.
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    responses: list[list[int]] = [[] for _ in prompts]
    for length in sorted(by_length):
        rows = by_length[length]
        batch = torch.tensor([list(prompts[index]) for index in rows])
        for index, response in zip(rows, _lock_step(model, batch, max_tokens, generator), strict=True):
            responses[index] = response
    return responses


@torch.inference_mode()
def _lock_step(
    model: CausalLM, prompts: torch.Tensor, max_tokens: int, generator: torch.Generator | None
) -> list[list[int]]:
    """Responses to prompts of equal length (`[rows, tokens]`)."""
    eos = cast(int, model.config.eos_token_id)
    cache = DynamicCache(config=model.config)
    responses: list[list[int]] = [[] for _ in range(len(prompts))]
    running = torch.arange(len(prompts))  # which response each row of the cache belongs to
    tokens = prompts
    for _ in range(max_tokens):
        logits = model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        chosen = _choose(logits, generator)
        for row, token in zip(_integers(running), _integers(chosen), strict=True):
            responses[row].append(token)
        going_on = (chosen != eos).nonzero()[:, 0]
        if len(going_on) < len(chosen):
            if len(going_on) == 0:
                break
            cache.batch_select_indices(going_on)
            running, chosen = running[going_on], chosen[going_on]
        tokens = chosen[:, None]
    return responses


def _choose(logits: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """The next token of each row: `[rows]` from `[rows, vocabulary]`."""
    if generator is None:
        return logits.argmax(dim=-1)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]


def _integers(values: torch.Tensor) -> list[int]:
    untyped: Any = values
    return cast(list[int], untyped.tolist())
