"""One rank that trains with torch."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from laminar.shell.logs import fields
from laminar.trainer import loop
from laminar.trainer.attempt import Attempt
from laminar.trainer.learner import Learner, TrainingPlan
from laminar.trainer.loss import LossRule
from laminar.trainer.model_folder import inspect
from laminar.trainer.policy import Policy
from laminar.trainer.pulse import Pulse
from laminar.trainer.ranks import Ranks
from laminar.trainer.settings import TrainerSettings
from laminar.trainer.torch_state import TorchState
from laminar.wire.sources import local_path
from laminar.wire.spec import JobSpec, LaminarJob

log = logging.getLogger(__name__)


def training_plan(spec: JobSpec) -> TrainingPlan:
    clip = spec.algorithm.clip
    rule = LossRule(clip_low=clip.low, clip_high=clip.high, temperature=spec.sampling.temperature)
    return TrainingPlan(rule, spec.algorithm.learning_rate, spec.algorithm.mini_batch_trajectories)


def run(settings: TrainerSettings, job: LaminarJob, stop_asked: Callable[[], bool]) -> None:
    """One rank from its first collective to its last."""
    torch.set_num_threads(1)  # of both cores of a busy machine, two threads take longer than one
    pulse = Pulse.from_env()
    ranks = Ranks.from_torchrun()
    folder = inspect(local_path(job.spec.model.source))
    learner = Learner(Policy.load(folder, ranks), training_plan(job.spec))
    state = TorchState(learner, folder)
    attempt = Attempt(settings, ranks, state, state.begin_save, job.spec.trainer.checkpoint.keep, pulse, stop_asked)
    loop.train(job.spec, attempt, learner)
    attempt.close()
    pulse.close()
    ranks.close()
    log.info("training ends", extra=fields(attempt=settings.attempt))


def main() -> int:
    """Returns the exit code of the rank."""
    return loop.main(run)
