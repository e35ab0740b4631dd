"""How the trainer ends when it cannot go on: one paragraph for people and an exit code that tells the cases apart."""

from __future__ import annotations

import textwrap

from laminar.core.reconcile import EXIT_BAD_INPUT

EXIT_CRASH = 1
"""Anything unforeseen; the traceback is in the log."""
EXIT_INPUT = EXIT_BAD_INPUT
"""The job's files, model or machine do not fit: the same attempt would fail again."""
EXIT_STORAGE = 3
"""Checkpoints cannot be written any more; a new attempt may find the volume healthy."""
EXIT_SUPERSEDED = 4
"""A newer attempt, or a newer generation of the pool, is in force: only a new attempt may go on."""


class TrainerFailure(Exception):
    """A foreseen end. `str` is one paragraph for people."""

    exit_code = EXIT_CRASH


class InputFailure(TrainerFailure):
    exit_code = EXIT_INPUT


class StorageFailure(TrainerFailure):
    exit_code = EXIT_STORAGE


class AttemptSuperseded(TrainerFailure):
    exit_code = EXIT_SUPERSEDED


def paragraph(failure: BaseException) -> str:
    """The failure's text on one line: libraries put whole reports into their messages."""
    return textwrap.shorten(" ".join(str(failure).split()), width=1500, placeholder=" ...")
