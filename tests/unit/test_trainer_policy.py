"""Which architectures let responses share a prompt, and that sharing changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from laminar.trainer.batches import Row, Trajectory, micro_batch
from laminar.trainer.policy import Policy
from laminar.trainer.ranks import Ranks

TINY: dict[str, Any] = dict(
    vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=1024
)
DECODER: dict[str, Any] = dict(TINY, num_key_value_heads=2, intermediate_size=64)


def policy_of(config: Any) -> Policy:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return Policy(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32), Ranks())


def group(*lengths: int, prompt: int = 40) -> Row:
    draw = np.random.default_rng(0)

    def tokens(count: int) -> Any:
        return draw.integers(0, 97, count, dtype=np.int32)

    start = tokens(prompt)
    return [(Trajectory(start, tokens(n), draw.normal(size=n).astype(np.float32), 1.0), 1.0) for n in lengths]


def logprobs_and_gradient(policy: Policy, rows: list[Row]) -> tuple[Tensor, Tensor]:
    policy.module.zero_grad()
    found = policy.logprobs(micro_batch(rows), 1.0)
    found.square().sum().backward()
    gradient = next(policy.module.parameters()).grad
    assert gradient is not None
    return found.detach(), gradient.clone()


@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen2Config(**DECODER),
        transformers.Qwen3Config(**DECODER, head_dim=8),
        transformers.LlamaConfig(**DECODER),
        transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=1024),
        transformers.GPTNeoXConfig(**TINY, intermediate_size=64),
    ],
    ids=lambda config: config.model_type,
)
def test_a_shared_row_gives_the_logprobs_and_gradients_of_rows_of_one(config: Any) -> None:
    policy = policy_of(config)
    pairs = group(1, 30, 7, 64)
    shared = policy.rows(pairs)
    assert len(shared) == 1
    logprobs, gradient = logprobs_and_gradient(policy, shared)
    wanted, wanted_gradient = logprobs_and_gradient(policy, [[pair] for pair in pairs])
    assert torch.allclose(logprobs, wanted, atol=1e-5)
    assert torch.allclose(gradient, wanted_gradient, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        transformers.MistralConfig(**DECODER, sliding_window=16),
        transformers.Gemma3TextConfig(**DECODER, head_dim=8, sliding_window=16),
        transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4),
        transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_that_follows_no_mask_of_ours_gets_a_row_for_each_response(config: Any) -> None:
    assert [len(row) for row in policy_of(config).rows(group(5, 6, 7))] == [1, 1, 1]
