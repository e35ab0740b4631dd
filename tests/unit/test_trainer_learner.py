"""One training step: updates, what is left out, statistics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from laminar.trainer.learner import Learner, TrainingPlan
from laminar.trainer.loss import LossRule
from laminar.trainer.model_folder import inspect
from laminar.trainer.policy import Policy
from laminar.trainer.ranks import Ranks
from laminar.wire.codec import pack_logprobs, pack_tokens
from laminar.wire.dataplane import BatchGroup, BatchSample, BatchSlice

MODEL = Path(__file__).parent.parent / "data" / "grpo_reference" / "reference_model"
LEARNING_RATE = 1e-3


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


def make_learner(mini_batch_trajectories: int | None = None) -> Learner:
    plan = TrainingPlan(LossRule(), LEARNING_RATE, mini_batch_trajectories)
    return Learner(Policy.load(inspect(MODEL), Ranks()), plan)


def group(number: int, rewards: list[float], behaviour: float = -1.0) -> BatchGroup:
    samples = [
        BatchSample(
            id=f"0/{number}/{index}", version=0, step=0, reward=reward, finish_reason="stop",
            tokens=pack_tokens([5 + number, 6 + index, 1]), logprobs=pack_logprobs([behaviour] * 3),
        )
        for index, reward in enumerate(rewards)
    ]  # fmt: skip
    return BatchGroup(group=f"0/{number}", prompt_tokens=pack_tokens([9, 8, 7 + number]), samples=samples)


def batch(step: int, *groups: BatchGroup) -> BatchSlice:
    return BatchSlice(
        step=step, rank=0, world=1, groups=list(groups), num_groups_total=len(groups),
        num_samples_total=sum(len(group.samples) for group in groups),
    )  # fmt: skip


def embedding(learner: Learner) -> torch.Tensor:
    return next(learner.policy.module.parameters()).detach().clone()


def test_groups_of_equal_rewards_are_out_of_loss_and_denominator() -> None:
    learner = make_learner()
    stats = learner.step(batch(1, group(0, [1.0, 0.0]), group(1, [1.0, 1.0]), group(2, [0.0, 0.0])))
    assert (stats["used_groups"], stats["loss_tokens"], stats["tokens"]) == (1, 6, 18)
    assert stats["reward_mean"] == pytest.approx(0.5)


def test_a_batch_without_a_signal_changes_nothing() -> None:
    learner = make_learner()
    before = embedding(learner)
    stats = learner.step(batch(1, group(0, [1.0, 1.0])))
    assert stats["updates"] == 0 and stats["loss"] == 0.0
    assert torch.equal(embedding(learner), before)


def test_mini_batches_are_updates_of_whole_groups() -> None:
    learner = make_learner(mini_batch_trajectories=4)
    stats = learner.step(batch(1, *(group(number, [1.0, 0.0]) for number in range(6))))
    assert stats["updates"] == 3


def test_the_learning_rate_warms_up_over_five_steps_and_depends_on_the_step_alone() -> None:
    learner = make_learner()
    rates = [learner.step(batch(step, group(0, [1.0, 0.0])))["learning_rate"] for step in (1, 4, 5, 500, 2)]
    assert rates == pytest.approx([0.2e-3, 0.8e-3, 1e-3, 1e-3, 0.4e-3])


def test_a_gradient_that_is_not_finite_is_skipped_and_counted() -> None:
    learner = make_learner()
    before = embedding(learner)
    stats = learner.step(batch(1, group(0, [1.0, 0.0], behaviour=math.nan)))
    assert stats["updates_not_finite"] == 1 and stats["updates"] == 0
    assert all(math.isfinite(value) for value in stats.values())
    assert torch.equal(embedding(learner), before)
    assert all(parameter.grad is None for parameter in learner.policy.module.parameters())


def test_engines_that_disagree_with_the_trainer_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    learner = make_learner()
    stats = learner.step(batch(1, group(0, [1.0, 0.0], behaviour=-1.0)))
    assert stats["logprob_diff_mean"] > 0.1
    assert "the trainer's log-probs differ" in caplog.text


def test_micro_batches_do_not_change_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [group(number, [1.0, 0.0, 0.0]) for number in range(8)]
    whole, cut = make_learner(), make_learner()
    monkeypatch.setattr("laminar.trainer.policy.MIN_MICRO_BATCH_TOKENS", 1)
    expected = whole.step(batch(1, *groups))
    monkeypatch.setattr("laminar.trainer.policy.MAX_MICRO_BATCH_TOKENS", 20)
    found = cut.step(batch(1, *groups))
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], abs=1e-6)
