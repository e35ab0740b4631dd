"""The next token of each row: one uniform number per (sample seed, position), then the inverse CDF.

The number depends on nothing else: not on the batch, the replica, or how often the sample has moved. So a continuation
draws what the undisturbed sample would have drawn, up to the arithmetic of the logits.

The number is the output function of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
OOPSLA 2014), applied twice: once to the seed, once to that and the position. Counter-based, so a row needs no state,
and all rows are one vector operation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# 48 bits: u times a sum of about 1 is then strictly below the sum in double precision, so that the search below
# never runs past the last token of positive probability.
_UNIFORM_BITS = 48
_MASK_64 = 2**64 - 1


def seed_state(seed: int) -> int:
    """The mixed seed of a sample, any integer: compute once, pass to `uniforms`."""
    return int(_mix(np.array([seed & _MASK_64], dtype=np.uint64))[0])


def uniforms(states: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), `[rows]`: the one of each (seed state, position in the response)."""
    counters = states + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    return (_mix(counters) >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64) * 2.0**-_UNIFORM_BITS


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def choose(
    logits: torch.Tensor, temperatures: torch.Tensor, draws: torch.Tensor, greedy: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens `[rows]` and their log-probs `[rows]` from `logits` `[rows, vocabulary]`.

    The log-prob is log_softmax(logits / T) at the token, the transform that training uses. `draws` are the uniform
    numbers (float64, `[rows]`); `greedy` marks rows that take the most likely token instead (None: no row does).
    """
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    targets = draws * cumulative[:, -1]
    # right=True: the first token whose cumulative probability is above the target, so never one of probability 0.
    tokens = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]
    if greedy is not None:
        tokens = torch.where(greedy, logprobs.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
