"""The training loop of one rank, and how it ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from types import FrameType

import torch

from laminar.shell.blocking import Conflict, Refused, Unreachable
from laminar.shell.logs import configure_logging, fields
from laminar.shell.settings import SettingsError
from laminar.trainer.attempt import Attempt
from laminar.trainer.exit_note import ExitNote
from laminar.trainer.failures import EXIT_CRASH, EXIT_SUPERSEDED, InputFailure, TrainerFailure, paragraph
from laminar.trainer.learner import Learner, TrainingPlan
from laminar.trainer.loss import LossRule
from laminar.trainer.model_folder import inspect
from laminar.trainer.policy import Policy
from laminar.trainer.pulse import Pulse
from laminar.trainer.ranks import Ranks
from laminar.trainer.settings import TrainerSettings, model_folder
from laminar.wire.messages import TakeStatus
from laminar.wire.spec import JobSpec, LaminarJob

log = logging.getLogger(__name__)

SUPERSEDED_WORDS = frozenset({"attempt", "generation", "version", "job"})
"""Errors of a 409 that say that others are in force now; the rest say that this attempt is wrong."""


def train(spec: JobSpec, attempt: Attempt, learner: Learner) -> None:
    """Until no step is left, or a stop is asked for. Every rank runs this, in step with the others."""
    step = attempt.restore()
    attempt.publish(step)
    while (answer := attempt.take(step + 1)) is TakeStatus.BATCH:
        step += 1
        stats = learner.step(attempt.slice(step))
        attempt.commit(step, stats)
        attempt.publish(step)
        if step % spec.trainer.checkpoint.every_steps == 0:
            attempt.checkpoint(step)
    attempt.finish(step, done=answer is TakeStatus.DONE)


def training_plan(spec: JobSpec) -> TrainingPlan:
    clip = spec.algorithm.clip
    rule = LossRule(clip_low=clip.low, clip_high=clip.high, temperature=spec.sampling.temperature)
    return TrainingPlan(rule, spec.algorithm.learning_rate, spec.algorithm.mini_batch_trajectories)


def run(settings: TrainerSettings, job: LaminarJob) -> None:
    """One rank from its first collective to its last."""
    stop = threading.Event()

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, ask_to_stop)
    torch.set_num_threads(1)  # of both cores of a busy machine, two threads take longer than one
    pulse = Pulse.from_env()
    ranks = Ranks.from_torchrun()
    folder = inspect(model_folder(job))
    learner = Learner(Policy.load(folder, ranks), training_plan(job.spec))
    attempt = Attempt(settings, learner, folder, pulse, stop.is_set)
    train(job.spec, attempt, learner)
    attempt.close()
    pulse.close()
    ranks.close()
    log.info("training ends", extra=fields(attempt=settings.attempt))


def main() -> int:
    """Returns the exit code; a foreseen failure leaves a note too, because torchrun passes no code on."""
    try:
        settings = TrainerSettings.from_env()
        configure_logging(settings.common)
        job = settings.common.load_job()
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return InputFailure.exit_code
    try:
        run(settings, job)
    except TrainerFailure as error:
        return _end(settings, error.exit_code, paragraph(error))
    except Conflict as error:
        if error.error in SUPERSEDED_WORDS:
            return _end(settings, EXIT_SUPERSEDED, f"Trainer attempt {settings.attempt} is superseded: {error.detail}.")
        return _end(settings, EXIT_CRASH, f"The pool refused trainer attempt {settings.attempt}: {error}")
    except (Refused, Unreachable) as error:
        return _end(settings, EXIT_CRASH, f"The pool ended trainer attempt {settings.attempt}: {error}")
    except Exception as error:
        rank = os.environ.get("RANK", "?")
        _leave_note(
            settings, EXIT_CRASH, f"Rank {rank} of the trainer failed: {type(error).__name__}: {paragraph(error)}"
        )
        raise
    return 0


def _end(settings: TrainerSettings, code: int, text: str) -> int:
    _leave_note(settings, code, text)
    print(f"error: {text}", file=sys.stderr, flush=True)
    return code


def _leave_note(settings: TrainerSettings, code: int, text: str) -> None:
    ExitNote(code, text).write(settings.common.dir, settings.attempt)
