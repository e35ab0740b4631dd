"""From the pool's batch slice to padded tensors.

Right padding under a causal model: no response token ever attends to padding, so there is no attention mask. Logits
are computed from the first position that predicts a response token of any row, not for the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laminar.core.groups import LAMINAR_ADVANTAGES, AdvantageRule, advantages
from laminar.core.samples import ToolSpan
from laminar.wire.dataplane import BatchGroup

TOKENS_DTYPE = np.dtype("<i4")
LOGPROBS_DTYPE = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One response that is in the loss, except its `tools`: tokens that no model chose, which are context only.

    Arrays: `prompt` int32 [p], `response` int32 [n], `behaviour` float32 [n].
    """

    prompt: npt.NDArray[np.int32]
    response: npt.NDArray[np.int32]
    behaviour: npt.NDArray[np.float32]
    advantage: float
    tools: tuple[ToolSpan, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.response)

    @property
    def num_loss_tokens(self) -> int:
        return len(self.response) - sum(span.length for span in self.tools)


def trajectories(group: BatchGroup, rule: AdvantageRule = LAMINAR_ADVANTAGES) -> list[Trajectory]:
    """The group's trajectories with their advantages; empty: equal rewards, the group stays out of the loss.

    Raises ValueError if tokens and log-probs of a sample differ in number, or a sample has no prompt.
    """
    values = advantages([sample.reward for sample in group.samples], rule)
    if values is None:
        return []
    prompt = np.frombuffer(group.prompt_tokens, dtype=TOKENS_DTYPE)
    if not len(prompt):
        raise ValueError(f"group {group.group} has an empty prompt")
    found: list[Trajectory] = []
    for sample, advantage in zip(group.samples, values, strict=True):
        response = np.frombuffer(sample.tokens, dtype=TOKENS_DTYPE)
        behaviour = np.frombuffer(sample.logprobs, dtype=LOGPROBS_DTYPE)
        if len(response) != len(behaviour):
            raise ValueError(f"sample {sample.id}: {len(response)} tokens but {len(behaviour)} log-probs")
        trajectory = Trajectory(prompt, response, behaviour, advantage, tuple(sample.tools))
        if trajectory.num_loss_tokens:
            found.append(trajectory)
    return found


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tensors of one forward and backward pass; positions count from `first`, the earliest that predicts a response."""

    tokens: Tensor
    """int64 [rows, width], padded on the right with token 0."""
    first: int
    targets: Tensor
    """int64 [rows, width - 1 - first]: the tokens that those positions predict."""
    behaviour: Tensor
    mask: Tensor
    advantages: Tensor
    weights: Tensor


def micro_batch(items: Sequence[Trajectory], weights: Sequence[float]) -> MicroBatch:
    """Pads the trajectories to one width. Without any: one row of weight 0, so that every rank runs the same passes."""
    if not items:
        items = [Trajectory(np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.float32), 0.0)]
        weights = [0.0]
    width = max(item.num_tokens for item in items)
    first = min(len(item.prompt) for item in items) - 1
    tokens = np.zeros((len(items), width), np.int64)
    behaviour = np.zeros((len(items), width - 1 - first), np.float32)
    mask = np.zeros_like(behaviour)
    for row, item in enumerate(items):
        start, end = len(item.prompt), item.num_tokens
        tokens[row, :start] = item.prompt
        tokens[row, start:end] = item.response
        # Token `start` is predicted at position start - 1, which is column start - 1 - first.
        columns = slice(start - 1 - first, end - 1 - first)
        behaviour[row, columns] = item.behaviour
        mask[row, columns] = 1.0
        for span in item.tools:
            mask[row, columns.start + span.start : columns.start + span.start + span.length] = 0.0
    if not any(weights):
        mask[:] = 0.0
    all_tokens = torch.from_numpy(tokens)
    return MicroBatch(
        tokens=all_tokens,
        first=first,
        targets=all_tokens[:, first + 1 :],
        behaviour=torch.from_numpy(behaviour),
        mask=torch.from_numpy(mask),
        advantages=torch.tensor([item.advantage for item in items], dtype=torch.float32),
        weights=torch.tensor(list(weights), dtype=torch.float32),
    )
