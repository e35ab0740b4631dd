"""One training step: a batch slice in, changed weights and statistics out.

    batch -> advantages -> updates (mini-batches of whole groups) -> micro-batches -> backward -> clip -> AdamW

Every rank runs the same number of updates and micro-batches, because each backward pass is a collective under FSDP.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laminar.core.groups import fill_to, num_updates, pack, split_updates
from laminar.shell.logs import fields
from laminar.trainer.batches import Trajectory, micro_batch, row_tokens, trajectories
from laminar.trainer.loss import LossRule, LossTerms, Totals, clipped_loss, sequence_weights
from laminar.trainer.policy import Policy, full_tensor
from laminar.wire.dataplane import BatchSlice

log = logging.getLogger(__name__)

BETAS = (0.9, 0.95)
MAX_GRADIENT_NORM = 1.0
WARM_UP_STEPS = 5
LOGPROB_DIFF_ALERT = 0.1
"""Mean |trainer - behaviour| log-prob of a batch above which an engine and the trainer disagree: bfloat16 engines
differ by 0.0015 on average, a lag of four steps on the example by less than 0.02."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    rule: LossRule
    learning_rate: float
    mini_batch_trajectories: int | None = None


@dataclass(slots=True)
class StepSums:
    """What the micro-batches of one step add up to, on one rank."""

    loss: float = 0.0
    num_tokens: int = 0
    num_clipped: float = 0.0
    diff_sum: float = 0.0
    negative_logprob_sum: float = 0.0
    ratio_max: float = 0.0
    diff_max: float = 0.0
    gradient_norms: list[float] = field(default_factory=lambda: [])
    num_not_finite: int = 0

    def add(self, terms: LossTerms) -> None:
        self.loss += terms.loss.item()
        if not terms.num_tokens:
            return
        self.num_tokens += terms.num_tokens
        self.num_clipped += terms.num_clipped
        self.diff_sum += terms.diff_sum
        self.negative_logprob_sum += terms.negative_logprob_sum
        self.ratio_max = max(self.ratio_max, terms.ratio_max)
        self.diff_max = max(self.diff_max, terms.diff_max)


class Learner:
    """Owns the optimizer. Invariant: the optimizer's state exists for every parameter from the start."""

    def __init__(self, policy: Policy, plan: TrainingPlan) -> None:
        self.policy = policy
        self.plan = plan
        parameters = [parameter for parameter in policy.module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=plan.learning_rate, betas=BETAS, weight_decay=0.0)
        for parameter in parameters:
            # AdamW would make this at its first step; made now, a checkpoint has the same content at every step.
            self.optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, batch: BatchSlice) -> dict[str, float]:
        """Trains on this rank's slice of a batch. Returns statistics over all ranks, finite numbers only."""
        started_s = time.monotonic()
        self._set_learning_rate(batch.step)
        groups = [trajectories(group) for group in batch.groups]
        sums = StepSums()
        updates = num_updates(batch.num_samples_total, self.plan.mini_batch_trajectories)
        for run in split_updates(len(groups), updates):
            self._update([groups[index] for index in run], sums)
        return self._statistics(batch, groups, sums) | {"train_s": time.monotonic() - started_s}

    def _set_learning_rate(self, step: int) -> None:
        """Warm-up, then constant: a function of the step alone, so that a resumed run needs no scheduler state."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.learning_rate * min(1.0, step / WARM_UP_STEPS)

    def _update(self, groups: Sequence[Sequence[Trajectory]], sums: StepSums) -> None:
        ranks, rule = self.policy.ranks, self.plan.rule
        lengths = [item.num_loss_tokens for items in groups for item in items]
        num_tokens, num_sequences = ranks.sum([sum(lengths), len(lengths)])
        if not num_tokens:
            return  # every group has equal rewards: nothing to learn, and AdamW's moments must not decay for it
        weights = iter(sequence_weights(lengths, rule, Totals(int(num_tokens), int(num_sequences))))
        weighted = [[(item, next(weights)) for item in items] for items in groups]
        rows = [row for group in weighted if group for row in self.policy.rows(group)]
        plan = pack([row_tokens([item for item, _ in row]) for row in rows], self.policy.micro_batch_tokens)
        (num_passes,) = ranks.max([len(plan)])
        for indexes in fill_to(plan, int(num_passes)):
            batch = micro_batch([rows[i] for i in indexes])
            logprobs = self.policy.logprobs(batch, rule.temperature)
            terms = clipped_loss(logprobs, batch.behaviour, batch.advantages, batch.weights, rule)
            terms.loss.backward()
            sums.add(terms)
        norm = gradient_norm(self.policy)
        if math.isfinite(norm):
            self.optimizer.step()
            sums.gradient_norms.append(norm)
        else:
            log.error("update skipped: the gradient is not finite", extra=fields(grad_norm=norm))
            sums.num_not_finite += 1
        self.optimizer.zero_grad()

    def _statistics(self, batch: BatchSlice, groups: list[list[Trajectory]], sums: StepSums) -> dict[str, float]:
        rewards = [sample.reward for group in batch.groups for sample in group.samples]
        all_tokens = sum(len(sample.tokens) // 4 for group in batch.groups for sample in group.samples)
        loss, tokens, clipped, diff, negative, used, reward, samples, response = self.policy.ranks.sum(
            [
                sums.loss, sums.num_tokens, sums.num_clipped, sums.diff_sum, sums.negative_logprob_sum,
                sum(1 for items in groups if items), sum(rewards), len(rewards), all_tokens,
            ]
        )  # fmt: skip
        ratio_max, diff_max = self.policy.ranks.max([sums.ratio_max, sums.diff_max])
        norms = sums.gradient_norms
        stats = {
            "loss": loss / max(len(norms) + sums.num_not_finite, 1),
            "grad_norm": sum(norms) / len(norms) if norms else 0.0,
            "updates": float(len(norms)),
            "updates_not_finite": float(sums.num_not_finite),
            "clip_fraction": clipped / max(tokens, 1.0),
            "ratio_max": ratio_max,
            "logprob_diff_mean": diff / max(tokens, 1.0),
            "logprob_diff_max": diff_max,
            "entropy_estimate": negative / max(tokens, 1.0),
            "reward_mean": reward / max(samples, 1.0),
            "used_groups": used,
            "loss_tokens": tokens,
            "tokens": response,
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
        }
        if stats["logprob_diff_mean"] > LOGPROB_DIFF_ALERT:
            log.warning(
                "the trainer's log-probs differ from those of the rollouts: check the engines' weights and numerics",
                extra=fields(step=batch.step, mean=stats["logprob_diff_mean"], max=diff_max),
            )
        return {name: value for name, value in stats.items() if math.isfinite(value)}


def gradient_norm(policy: Policy, limit: float = MAX_GRADIENT_NORM) -> float:
    """Global L2 norm before clipping; clips the gradients to `limit`."""
    norm: Tensor = torch.nn.utils.clip_grad_norm_(policy.module.parameters(), limit)
    return full_tensor(norm).item()
