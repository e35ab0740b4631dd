"""Results of tools inside a response: the model reads them, and learns nothing from them."""

from __future__ import annotations

import torch

from laminar.core.samples import ToolSpan
from laminar.trainer.batches import micro_batch, trajectories
from laminar.wire.codec import pack_logprobs, pack_tokens
from laminar.wire.dataplane import BatchGroup, BatchSample


def group(tools: list[ToolSpan]) -> BatchGroup:
    samples = [
        BatchSample(
            id=f"0/0/{index}", version=0, step=0, tokens=pack_tokens([11, 12, 13, 14]),
            logprobs=pack_logprobs([-1.0, -2.0, -3.0, -4.0]), reward=float(index), finish_reason="stop",
            tools=tools if index else [],
        )
        for index in range(2)
    ]  # fmt: skip
    return BatchGroup(group="0/0", prompt_tokens=pack_tokens([5, 6]), samples=samples)


def test_results_of_tools_are_fed_and_stay_out_of_loss_and_denominator() -> None:
    plain, called = trajectories(group([ToolSpan(1, 2, 0)]))
    assert (plain.num_loss_tokens, called.num_loss_tokens) == (4, 2)
    batch = micro_batch([[(called, 0.5)]])
    assert batch.tokens.tolist() == [[5, 6, 11, 12, 13]], "they are context"
    assert batch.targets.tolist() == [11, 14]
    assert batch.sources.tolist() == [0, 3], "each is predicted by the token before it"
    assert batch.behaviour.tolist() == [-1.0, -4.0]
    assert (batch.advantages.shape, batch.weights.tolist()) == (torch.Size([2]), [0.5, 0.5])
    both = micro_batch([[(plain, 0.5), (called, 0.5)]])
    assert both.targets.tolist() == [11, 12, 13, 14, 11, 14]


def test_a_response_of_nothing_but_tools_is_not_trained_on() -> None:
    (only,) = trajectories(group([ToolSpan(0, 4, 0)]))
    assert only.tools == ()
