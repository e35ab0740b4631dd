"""The clipped policy-gradient loss of GRPO with clip-higher, token by token (docs/algorithm.md).

    ratio_t = exp(logp_t - behaviour_t)
    loss_t  = -min(ratio_t A, clamp(ratio_t, 1 - low, 1 + high) A)
    loss    = sum_t weight_t loss_t

The definitions of the literature differ in the weights only, so one code path computes them all. `behaviour` is the
log-prob that the rollout engine recorded when it sampled the token, at the same temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

import torch
from torch import Tensor


class Normalisation(StrEnum):
    """What a token's loss is divided by."""

    TOKENS = "tokens"
    """All response tokens of the update that are in the loss (DAPO; our default)."""
    SEQUENCES = "sequences"
    """The token's own sequence length, then the number of sequences (GRPO as first published)."""
    CONSTANT = "constant"
    """Number of sequences x maximal response length (Dr. GRPO)."""


@dataclass(frozen=True, slots=True)
class LossRule:
    normalisation: Normalisation = Normalisation.TOKENS
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_response_tokens: int = 1
    """Used by CONSTANT only."""
    temperature: float = 1.0
    """Log-probs are of logits / temperature, as they were sampled."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Of one update, over all ranks; trajectories without advantages are not counted."""

    num_tokens: int
    num_sequences: int


def sequence_weights(lengths: Sequence[int], rule: LossRule, totals: Totals) -> list[float]:
    """Weight of each token of a sequence, for sequences with so many tokens in the loss (each at least 1)."""
    match rule.normalisation:
        case Normalisation.TOKENS:
            return [1.0 / totals.num_tokens] * len(lengths)
        case Normalisation.SEQUENCES:
            return [1.0 / (length * totals.num_sequences) for length in lengths]
        case Normalisation.CONSTANT:
            return [1.0 / (totals.num_sequences * rule.max_response_tokens)] * len(lengths)
        case _:
            assert_never(rule.normalisation)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Of one micro-batch. `loss` carries the gradient; the rest are sums and maxima for statistics."""

    loss: Tensor
    num_tokens: int
    num_clipped: float
    ratio_max: float
    diff_sum: float
    """Sum over tokens of |trainer's log-prob - behaviour|."""
    diff_max: float
    negative_logprob_sum: float


def token_logprobs(logits: Tensor, sources: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """[n] log-probs of `targets` [n] under logits [..., vocabulary], in float32; `sources` [n]: rows of logits.

    By single values and logsumexp: a full log-softmax would keep one more tensor of the logits' size for the backward
    pass.
    """
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    chosen = scaled.flatten()[sources * logits.shape[-1] + targets]
    return chosen - torch.logsumexp(scaled, dim=-1).flatten()[sources]


def clipped_loss(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, weights: Tensor, rule: LossRule) -> LossTerms:
    """All arguments: [n], one value for each response token. Without tokens, loss and gradient are exactly 0."""
    difference = logprobs - behaviour
    ratio = torch.exp(difference)
    clamped = ratio.clamp(1.0 - rule.clip_low, 1.0 + rule.clip_high)
    per_token = -torch.minimum(ratio * advantages, clamped * advantages)
    loss = (per_token * weights).sum()
    num_tokens = logprobs.numel()
    if not num_tokens:
        return LossTerms(loss, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
    with torch.no_grad():
        clipped = ((ratio > 1.0 + rule.clip_high) & (advantages > 0)) | (
            (ratio < 1.0 - rule.clip_low) & (advantages < 0)
        )
        absolute = difference.abs()
        return LossTerms(
            loss=loss,
            num_tokens=num_tokens,
            num_clipped=clipped.sum().item(),
            ratio_max=ratio.max().item(),
            diff_sum=absolute.sum().item(),
            diff_max=absolute.max().item(),
            negative_logprob_sum=-logprobs.sum().item(),
        )
