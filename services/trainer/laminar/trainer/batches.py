"""From the pool's batch slice to padded tensors.

    row:       prompt | response a, without its last token | response b, without its last token | padding
    position:  0..p-1 | p..                                | p..                                |

A row holds one copy of a prompt and one or more of its responses; each sees the prompt and itself. Padding is on the
right, where no token of a row ever attends. Rows of one response each need no mask: the model is causal. Logits are
computed from the first position that predicts a response token of any row, not for the prompts.
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
    def num_loss_tokens(self) -> int:
        return len(self.response) - sum(span.length for span in self.tools)

    @property
    def is_trained(self) -> npt.NDArray[np.bool_]:
        """bool [n]: the tokens in the loss."""
        trained = np.ones(len(self.response), np.bool_)
        for span in self.tools:
            trained[span.start : span.start + span.length] = False
        return trained


Row = Sequence[tuple[Trajectory, float]]
"""Trajectories of one prompt, each with the weight of its tokens in the loss."""


def row_tokens(row: Sequence[Trajectory]) -> int:
    """Tokens that are fed: the prompt once, and of each response all but the last, which predicts nothing."""
    return len(row[0].prompt) + sum(len(item.response) - 1 for item in row)


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
    """Tensors of one forward and backward pass over [rows, width] tokens that predict n response tokens in all."""

    tokens: Tensor
    """int64 [rows, width], padded on the right with token 0."""
    positions: Tensor | None
    """int64 [rows, width]; None: 0, 1, 2, ... in each row."""
    visible: Tensor | None
    """bool [rows, 1, width, width]: which columns (last) a token (one before) sees; None: causal."""
    first: int
    """The earliest column that predicts a response token."""
    sources: Tensor
    """int64 [n]: what predicts each token, as row * (width - first) + column - first."""
    targets: Tensor
    """int64 [n]: the response tokens in the loss."""
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    """float32 [n] each."""


def micro_batch(rows: Sequence[Row]) -> MicroBatch:
    """Pads rows to one width. Without any: one row that predicts nothing, so that every rank runs the same passes."""
    if not rows:
        return _nothing()
    width = max(row_tokens([item for item, _ in row]) for row in rows)
    first = min(len(row[0][0].prompt) for row in rows) - 1
    tokens = np.zeros((len(rows), width), np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    response = np.full((len(rows), width), PADDING, np.int16)
    sources: list[npt.NDArray[np.int64]] = []
    targets: list[npt.NDArray[np.int32]] = []
    behaviour: list[npt.NDArray[np.float32]] = []
    for number, row in enumerate(rows):
        prompt = row[0][0].prompt
        end = len(prompt)
        tokens[number, :end], positions[number, :end], response[number, :end] = prompt, np.arange(end), PROMPT
        for index, (item, _) in enumerate(row):
            start, end = end, end + len(item.response) - 1
            tokens[number, start:end] = item.response[:-1]
            positions[number, start:end] = np.arange(len(prompt), len(prompt) + end - start)
            response[number, start:end] = index
            columns = np.concatenate(([len(prompt) - 1], np.arange(start, end)))
            trained = item.is_trained
            sources.append((number * (width - first) + columns - first)[trained])
            targets.append(item.response[trained])
            behaviour.append(item.behaviour[trained])
    shared = any(len(row) > 1 for row in rows)
    items = [pair for row in rows for pair in row]
    lengths = [item.num_loss_tokens for item, _ in items]
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions) if shared else None,
        visible=_visible(torch.from_numpy(response)) if shared else None,
        first=first,
        sources=torch.from_numpy(np.concatenate(sources)),
        targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        behaviour=torch.from_numpy(np.concatenate(behaviour)),
        advantages=_spread([item.advantage for item, _ in items], lengths),
        weights=_spread([weight for _, weight in items], lengths),
    )


PROMPT, PADDING = -1, -2
"""Beside the numbers of a row's responses."""


def _visible(response: Tensor) -> Tensor:
    """`response`: int [rows, width], the response that each token belongs to."""
    width = response.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril_()
    seen = (response[:, None, :] == PROMPT) | (response[:, None, :] == response[:, :, None])
    return (seen & causal)[:, None]


def _spread(values: Sequence[float], lengths: Sequence[int]) -> Tensor:
    return torch.repeat_interleave(torch.tensor(values, dtype=torch.float32), torch.tensor(lengths))


def _nothing() -> MicroBatch:
    empty = torch.zeros(0)
    return MicroBatch(
        tokens=torch.zeros(1, 1, dtype=torch.int64), positions=None, visible=None, first=0,
        sources=empty.long(), targets=empty.long(), behaviour=empty, advantages=empty, weights=empty,
    )  # fmt: skip
