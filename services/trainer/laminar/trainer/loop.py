"""The training loop of one rank, whoever trains, and how it ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from laminar.shell.blocking import Conflict, Refused, Unreachable
from laminar.shell.calls import OldGeneration
from laminar.shell.logs import configure_logging
from laminar.shell.settings import SettingsError
from laminar.trainer.attempt import Attempt
from laminar.trainer.exit_note import ExitNote
from laminar.trainer.failures import EXIT_CRASH, EXIT_SUPERSEDED, InputFailure, TrainerFailure, paragraph
from laminar.trainer.settings import TrainerSettings
from laminar.wire.dataplane import BatchSlice
from laminar.wire.messages import TakeStatus
from laminar.wire.spec import JobSpec, LaminarJob

log = logging.getLogger(__name__)

SUPERSEDED_WORDS = frozenset({"attempt", "generation", "version", "job"})
"""Errors of a 409 that say that others are in force now; the rest say that this attempt is wrong."""


class Trains(Protocol):
    def step(self, batch: BatchSlice) -> dict[str, float]:
        """One training step on this rank's slice. Returns statistics over all ranks, finite numbers only."""
        ...


Run = Callable[[TrainerSettings, LaminarJob, Callable[[], bool]], None]
"""One rank from its first collective to its last; the last argument says whether a stop has been asked for."""


def train(spec: JobSpec, attempt: Attempt, learner: Trains) -> None:
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


def main(run: Run) -> int:
    """Returns the exit code; a foreseen failure leaves a note too, because torchrun passes no code on."""
    try:
        settings = TrainerSettings.from_env()
        configure_logging(settings.common)
        job = settings.common.load_job()
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return InputFailure.exit_code
    try:
        run(settings, job, _stop_asked())
    except TrainerFailure as error:
        return _end(settings, error.exit_code, paragraph(error))
    except (Conflict, OldGeneration) as error:
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


def _stop_asked() -> Callable[[], bool]:
    """From now on SIGTERM asks for a stop."""
    stop = threading.Event()

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        stop.set()

    signal.signal(signal.SIGTERM, ask_to_stop)
    return stop.is_set


def _end(settings: TrainerSettings, code: int, text: str) -> int:
    _leave_note(settings, code, text)
    print(f"error: {text}", file=sys.stderr, flush=True)
    return code


def _leave_note(settings: TrainerSettings, code: int, text: str) -> None:
    ExitNote(code, text).write(settings.common.dir, settings.attempt)
