"""Saving and restoring what training needs, by torch.distributed.checkpoint.

A save copies the state to host memory (the only time training waits) and is written by threads, while training goes
on. Content: weights, AdamW's state, the step. Learning rate is a function of the step and training draws no random
numbers, so nothing else is needed to continue bit for bit. A checkpoint can be restored by another number of ranks.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load  # pyright: ignore[reportUnknownVariableType]
from torch.distributed.checkpoint.state_dict_saver import async_save  # pyright: ignore[reportUnknownVariableType]

from laminar.shell.logs import fields
from laminar.trainer import checkpoint_folder
from laminar.trainer.background import Background
from laminar.trainer.books import Books
from laminar.trainer.failures import InputFailure, StorageFailure, paragraph
from laminar.trainer.learner import Learner
from laminar.trainer.ranks import Ranks
from laminar.wire.messages import CheckpointInfo, ResumePoint

log = logging.getLogger(__name__)

SAVE_DEADLINE_S = 600.0
MODEL_PREFIX = "model."
"""Of the names in a checkpoint that are weights."""

State = dict[str, dict[str, Any]]


def training_state(learner: Learner, step: int) -> State:
    """Everything to be saved; its tensors are those of the learner, so loading into it restores the learner."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in learner.policy.module.named_parameters()}
    optimizer = {names[parameter]: dict(values) for parameter, values in learner.optimizer.state.items()}
    return {
        "model": {name: tensor.detach() for name, tensor in learner.policy.named_tensors()},
        "optimizer": optimizer,
        "trainer": {"step": torch.tensor(step)},
    }


def restore(learner: Learner, folder: Path) -> int:
    """Loads a verified checkpoint into the learner; a collective. Returns its step. Raises InputFailure."""
    state = training_state(learner, -1)
    try:
        load(
            cast("dict[str, Any]", state),
            storage_reader=FileSystemReader(folder),
            no_dist=not dist.is_initialized(),
        )
    except CheckpointException as error:
        raise InputFailure(f"The checkpoint {folder} does not fit the model of this job: {paragraph(error)}") from error
    return int(cast("Tensor", state["trainer"]["step"]).item())


@dataclass(frozen=True, slots=True)
class Choice:
    """What to restore (None: start from the model) and how many better checkpoints were damaged."""

    checkpoint: CheckpointInfo | None
    num_damaged: int = 0


def choose(root: Path, resume: ResumePoint) -> Choice:
    """The best undamaged checkpoint. Raises InputFailure if there were some and all are damaged."""
    problems: list[str] = []
    for info in checkpoint_folder.candidates(resume):
        problem = checkpoint_folder.verify(root / info.path, info.manifest)
        if not problem:
            return Choice(info, len(problems))
        problems.append(problem)
        log.error(
            "a checkpoint is damaged; the next older one is tried",
            extra=fields(checkpoint=info.path, problem=problem, num_damaged=len(problems)),
        )
    if problems:
        raise InputFailure(
            f"No kept checkpoint in {root} can be restored: {'; '.join(problems)}. Put the files back from a copy, or "
            f"start the job anew (laminar run --fresh)."
        )
    return Choice(None)


class CheckpointWriter(FileSystemWriter):
    """Refuses to make the checkpoints' folder: if it is gone, its volume is."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self._folder = folder

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        if not self._folder.parent.is_dir():
            raise FileNotFoundError(f"the folder {self._folder.parent} is gone")
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)


class Checkpointer:
    """Owner: the training thread of each rank, which makes the same calls on all. One save at a time.

    Rank 0 alone seals, registers and deletes. A failed save is reported to the pool, which counts them, and training
    goes on for as long as the pool hands out batches.
    """

    def __init__(self, root: Path, attempt: int, ranks: Ranks, make_books: Callable[[], Books]) -> None:
        self._root = root
        self._attempt = attempt
        self._ranks = ranks
        self._make_books = make_books
        self._group: dist.ProcessGroup | None = ranks.side_channel()
        self._written: Future[Any] | None = None
        self._sealing: Background | None = None
        self._failure = ""
        """Of the last save."""

    def save(self, learner: Learner, step: int) -> float:
        """Begins a save; returns the seconds that training stood still. Waits for the save before, if it still runs."""
        started_s = time.monotonic()
        self.finish()
        folder = self._root / (checkpoint_folder.name_of(step, self._attempt) + checkpoint_folder.UNFINISHED)
        written = async_save(  # pyright: ignore[reportUnknownVariableType]
            cast("dict[str, Any]", training_state(learner, step)),
            storage_writer=CheckpointWriter(folder),
            process_group=self._group,
            no_dist=not dist.is_initialized(),
        )
        self._written = cast("Future[Any]", written)
        if self._ranks.is_first:
            self._sealing = Background("checkpoint", lambda: self._seal(folder, step, self._written))
        return time.monotonic() - started_s

    def finish(self) -> None:
        """Waits for the save that runs, if any. Raises what ended it, other than a failure to write."""
        if self._written is not None:
            self._written.exception(SAVE_DEADLINE_S)  # rank 0 reports a failed write; the others just go on
            self._written = None
        if self._sealing is not None:
            self._sealing.join(SAVE_DEADLINE_S)
            self._sealing = None

    def check(self) -> None:
        """Raises what ended the sealing thread; a failure to write is none of it."""
        if self._sealing is not None:
            self._sealing.check_if_ended()

    def require_saved(self) -> None:
        """At the end: raises StorageFailure if the last save, waited for with `finish`, could not be written."""
        if self._failure:
            raise StorageFailure(
                f"The last checkpoint could not be written to {self._root}: {self._failure}. Free space on that volume "
                f"or mount it again, then run the job again: it goes on from the last good checkpoint."
            )

    def _seal(self, folder: Path, step: int, written: Future[Any] | None) -> None:
        assert written is not None
        with self._make_books() as books:
            ledger = books.ledger(step)
            try:
                written.result(SAVE_DEADLINE_S)
                checkpoint_folder.write_synced(folder / checkpoint_folder.LEDGER, ledger)
                info = checkpoint_folder.seal(folder, step, self._attempt)
            except (CheckpointException, OSError) as error:
                self._report_failure(books, folder, step, error)
                return
            reply = books.checkpoint_durable(info)
            self._failure = ""
            log.info("checkpoint written", extra=fields(step=step, path=info.path))
            for old in reply.removable:
                self._remove(old)

    def _report_failure(self, books: Books, folder: Path, step: int, error: BaseException) -> None:
        reason = paragraph(_root_cause(error))
        self._failure = reason
        log.error("checkpoint failed", extra=fields(step=step, reason=reason))
        shutil.rmtree(folder, ignore_errors=True)  # what cannot be removed now goes at the next start
        books.checkpoint_failed(step, reason)

    def _remove(self, info: CheckpointInfo) -> None:
        try:
            checkpoint_folder.remove(self._root, info)
        except OSError as error:
            log.warning("an old checkpoint stays", extra=fields(path=info.path, reason=error))


def _root_cause(error: BaseException) -> BaseException:
    """Of the ranks' failures the first one; torch wraps it into a report with its traceback."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error
