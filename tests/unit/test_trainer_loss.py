"""The loss against the stored numbers of TRL 1.16 and of our own convention, on one recorded batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from laminar.core.groups import LAMINAR_ADVANTAGES, TRL_ADVANTAGES, AdvantageRule, pack
from laminar.trainer.batches import MicroBatch, Row, Trajectory, micro_batch, row_tokens, trajectories
from laminar.trainer.learner import gradient_norm
from laminar.trainer.loss import LossRule, LossTerms, Normalisation, Totals, clipped_loss, sequence_weights
from laminar.trainer.model_folder import inspect
from laminar.trainer.policy import Policy
from laminar.trainer.ranks import Ranks
from laminar.wire.codec import pack_logprobs, pack_tokens
from laminar.wire.dataplane import BatchGroup, BatchSample

FOLDER = Path(__file__).parent.parent / "data" / "grpo_reference"
BATCH = np.load(FOLDER / "reference_batch.npz")
RESULTS = cast("dict[str, Any]", json.loads(str(BATCH["results_json"])))
WEIGHT_FACTOR = float(RESULTS["sigma"])


def perturb(policy: Policy) -> None:
    """theta1 of the reference: w_i (1 + 0.15 sin(i + 1)), in float64."""
    with torch.no_grad():
        for parameter in policy.module.parameters():
            index = torch.arange(1, parameter.numel() + 1, dtype=torch.float64)
            values = parameter.double().flatten() * (1 + WEIGHT_FACTOR * torch.sin(index))
            parameter.copy_(values.float().view_as(parameter))


@pytest.fixture(scope="module")
def policies() -> Iterator[dict[str, Policy]]:
    torch.set_num_threads(1)
    folder = inspect(FOLDER / "reference_model")
    made = {"theta0": Policy.load(folder, Ranks()), "theta1": Policy.load(folder, Ranks())}
    perturb(made["theta1"])
    yield made


def recorded_groups() -> list[BatchGroup]:
    """The 16 groups of the recorded batch as the pool would send them."""
    groups: list[BatchGroup] = []
    for number in sorted(set(BATCH["group"].tolist())):
        rows = np.flatnonzero(BATCH["group"] == number)
        samples = [
            BatchSample(
                id=f"0/{number}/{row}", version=0, step=0, reward=float(BATCH["rewards"][row]), finish_reason="stop",
                tokens=pack_tokens(response(row)), logprobs=pack_logprobs(behaviour(row)),
            )
            for row in map(int, rows)
        ]  # fmt: skip
        prompt = BATCH["prompt_ids"][rows[0]][BATCH["prompt_mask"][rows[0]] == 1].tolist()
        groups.append(BatchGroup(group=f"0/{number}", prompt_tokens=pack_tokens(prompt), samples=samples))
    return groups


def response(row: int) -> list[int]:
    return BATCH["completion_ids"][row][BATCH["completion_mask"][row] == 1].tolist()


def behaviour(row: int) -> list[float]:
    return BATCH["old_logprobs"][row][: len(response(row))].tolist()


def micro_batches(
    groups: list[list[Trajectory]], rule: LossRule, rows_of: Callable[[Row], Sequence[Row]]
) -> list[MicroBatch]:
    lengths = [len(item.response) for items in groups for item in items]
    weights = iter(sequence_weights(lengths, rule, Totals(sum(lengths), len(lengths))))
    rows = [row for items in groups if items for row in rows_of([(item, next(weights)) for item in items])]
    plan = pack([row_tokens([item for item, _ in row]) for row in rows], 1500)
    return [micro_batch([rows[i] for i in indexes]) for indexes in plan]


def alone(group: Row) -> list[Row]:
    return [[pair] for pair in group]


def terms_of(policy: Policy, batch: MicroBatch, rule: LossRule) -> LossTerms:
    logprobs = policy.logprobs(batch, rule.temperature)
    return clipped_loss(logprobs, batch.behaviour, batch.advantages, batch.weights, rule)


def loss_and_norm(
    policy: Policy, rule: LossRule, advantage_rule: AdvantageRule, rows_of: Callable[[Row], Sequence[Row]] = alone
) -> tuple[float, float]:
    groups = [trajectories(group, advantage_rule) for group in recorded_groups()]
    policy.module.zero_grad()
    loss = 0.0
    for batch in micro_batches(groups, rule, rows_of):
        terms = terms_of(policy, batch, rule)
        terms.loss.backward()
        loss += terms.loss.item()
    return loss, gradient_norm(policy, limit=float("inf"))


TRL_RULES = {
    "dapo": LossRule(Normalisation.TOKENS),
    "grpo": LossRule(Normalisation.SEQUENCES),
    "dr_grpo": LossRule(Normalisation.CONSTANT, max_response_tokens=160),
}


@pytest.mark.parametrize("theta", ["theta0", "theta1"])
@pytest.mark.parametrize("kind", list(TRL_RULES))
def test_loss_and_gradient_equal_those_of_trl(policies: dict[str, Policy], kind: str, theta: str) -> None:
    expected = RESULTS[f"{kind}/{'lag0' if theta == 'theta0' else 'perturbed'}"]
    loss, norm = loss_and_norm(policies[theta], TRL_RULES[kind], TRL_ADVANTAGES)
    assert loss == pytest.approx(expected["loss"], abs=1e-6)
    assert norm == pytest.approx(expected["grad_norm"], abs=1e-6)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(
    ("theta", "expected_loss", "expected_norm"),
    [("theta0", 0.09921008, 0.26067981), ("theta1", 0.10390618, 0.39283150)],
)
def test_loss_and_gradient_of_our_own_convention(
    policies: dict[str, Policy], theta: str, expected_loss: float, expected_norm: float, is_shared: bool
) -> None:
    policy = policies[theta]
    loss, norm = loss_and_norm(policy, LossRule(), LAMINAR_ADVANTAGES, policy.rows if is_shared else alone)
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    assert norm == pytest.approx(expected_norm, abs=1e-6)


def test_responses_of_a_group_share_one_copy_of_the_prompt(policies: dict[str, Policy]) -> None:
    groups = [trajectories(group, TRL_ADVANTAGES) for group in recorded_groups()]
    shared = micro_batches(groups, LossRule(), policies["theta0"].rows)
    apart = micro_batches(groups, LossRule(), alone)
    assert sum(batch.tokens.numel() for batch in shared) < 0.6 * sum(batch.tokens.numel() for batch in apart)
    assert sum(len(batch.targets) for batch in shared) == sum(len(batch.targets) for batch in apart)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(("theta", "stored"), [("theta0", "old_logprobs"), ("theta1", "perturbed_logprobs")])
def test_logprobs_equal_the_recorded_ones(
    policies: dict[str, Policy], theta: str, stored: str, is_shared: bool
) -> None:
    rows = [
        row
        for number in sorted(set(BATCH["group"].tolist()))
        for row in np.flatnonzero(BATCH["group"] == number).tolist()
    ]
    expected = iter([BATCH[stored][row][: len(response(row))] for row in rows])
    policy = policies[theta]
    with torch.no_grad():
        for group in recorded_groups():
            pairs = [(item, 1.0) for item in trajectories(group, TRL_ADVANTAGES)]
            found = policy.logprobs(micro_batch(policy.rows(pairs) if is_shared else alone(pairs)), 1.0).numpy()
            wanted = np.concatenate([next(expected) for _ in pairs])
            assert np.abs(found - wanted).max() <= 2e-5


def test_the_advantages_equal_the_recorded_ones() -> None:
    for rule, stored in ((TRL_ADVANTAGES, "advantages_trl"), (LAMINAR_ADVANTAGES, "advantages_probe")):
        for number, group in zip(sorted(set(BATCH["group"].tolist())), recorded_groups(), strict=True):
            found = [item.advantage for item in trajectories(group, rule)] or [0.0] * len(group.samples)
            assert found == pytest.approx(BATCH[stored][BATCH["group"] == number].tolist(), abs=1e-6)


def test_the_clip_fraction_equals_the_recorded_one(policies: dict[str, Policy]) -> None:
    groups = [trajectories(group, TRL_ADVANTAGES) for group in recorded_groups()]
    clipped = tokens = 0.0
    with torch.no_grad():
        for batch in micro_batches(groups, LossRule(), alone):
            terms = terms_of(policies["theta1"], batch, LossRule())
            clipped += terms.num_clipped
            tokens += terms.num_tokens
    assert clipped / tokens == pytest.approx(0.0156021, abs=1e-6)


def test_a_micro_batch_without_trajectories_has_no_loss_and_a_gradient_of_zero(policies: dict[str, Policy]) -> None:
    policy = policies["theta0"]
    policy.module.zero_grad()
    terms = terms_of(policy, micro_batch([]), LossRule())
    terms.loss.backward()
    assert terms.loss.item() == 0.0 and terms.num_tokens == 0
    # Zeros, not None: under FSDP each backward pass is a collective that reduces every gradient.
    assert all(parameter.grad is not None for parameter in policy.module.parameters())
    assert gradient_norm(policy, limit=float("inf")) == 0.0


def test_a_temperature_divides_the_logits(policies: dict[str, Policy]) -> None:
    item = trajectories(recorded_groups()[0], TRL_ADVANTAGES)[0]
    batch = micro_batch([[(item, 1.0)]])
    with torch.no_grad():
        logits = policies["theta0"].module(input_ids=batch.tokens, use_cache=False).logits[0, batch.first :]
        expected = torch.log_softmax(logits / 0.7, -1).gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
        found = policies["theta0"].logprobs(batch, 0.7)
    assert (found - expected).abs().max().item() < 1e-5


def test_tokens_without_logprobs_are_refused() -> None:
    sample = BatchSample(
        id="0/0/0", version=0, step=0, tokens=pack_tokens([1, 2]), logprobs=b"", reward=1.0, finish_reason="stop"
    )
    other = BatchSample(id="0/0/1", version=0, step=0, tokens=b"", logprobs=b"", reward=0.0, finish_reason="stop")
    with pytest.raises(ValueError, match="2 tokens but 0 log-probs"):
        trajectories(BatchGroup(group="0/0", prompt_tokens=pack_tokens([3]), samples=[sample, other]))
