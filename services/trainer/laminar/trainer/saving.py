"""When a checkpoint is saved, sealed, registered and removed; what is in it is somebody else's business.

save -> written by threads or at once (`BeginSave`) -> sealed with the pool's ledger -> registered -> old ones removed
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from laminar.shell.logs import fields
from laminar.trainer import checkpoint_folder
from laminar.trainer.background import Background
from laminar.trainer.books import Books
from laminar.trainer.failures import InputFailure, StorageFailure, paragraph
from laminar.wire.messages import CheckpointInfo, ResumePoint

log = logging.getLogger(__name__)

SAVE_DEADLINE_S = 600.0


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


WaitWritten = Callable[[float], None]
"""Waits until everything is written. Raises OSError if something could not be, TimeoutError after so many seconds."""


class BeginSave(Protocol):
    def __call__(self, folder: Path, step: int) -> WaitWritten:
        """Begins to write what training needs into the new `folder`; a collective. Training may go on once it
        returns. The parent of `folder` is never made: if it is gone, its volume is."""
        ...


class Checkpointer:
    """Owner: the training thread of each rank, which makes the same calls on all. One save at a time.

    Rank 0 alone seals, registers and deletes. A failed save is reported to the pool and training goes on; after
    `keep` of them in a row `check` raises.
    """

    def __init__(
        self, root: Path, attempt: int, keep: int, begin_save: BeginSave, make_books: Callable[[], Books], *,
        is_first: bool = True,
    ) -> None:  # fmt: skip
        self._root = root
        self._attempt = attempt
        self._keep = keep
        self._begin_save = begin_save
        self._make_books = make_books
        self._is_first = is_first
        self._wait_written: WaitWritten | None = None
        self._sealing: Background | None = None
        self._failures: list[str] = []

    def save(self, step: int) -> float:
        """Begins a save; returns the seconds that training stood still. Waits for the save before, if it still runs."""
        started_s = time.monotonic()
        self.finish()
        folder = self._root / (checkpoint_folder.name_of(step, self._attempt) + checkpoint_folder.UNFINISHED)
        wait_written = self._wait_written = self._begin_save(folder, step)
        if self._is_first:
            self._sealing = Background("checkpoint", lambda: self._seal(folder, step, wait_written))
        return time.monotonic() - started_s

    def finish(self) -> None:
        """Waits for the save that runs, if any. Raises what ended it, other than a failure to write."""
        if self._wait_written is not None:
            try:
                self._wait_written(SAVE_DEADLINE_S)
            except TimeoutError:
                raise
            except OSError:
                pass  # rank 0 reports a failed write; the others just go on
            self._wait_written = None
        if self._sealing is not None:
            self._sealing.join(SAVE_DEADLINE_S)
            self._sealing = None

    def check(self) -> None:
        """Raises StorageFailure after `keep` failed saves in a row, and what ended the sealing thread."""
        if self._sealing is not None:
            self._sealing.check_if_ended()
        if len(self._failures) >= self._keep:
            raise StorageFailure(
                f"The last {len(self._failures)} checkpoints could not be written to {self._root}, the latest because: "
                f"{self._failures[-1]}. Training stops here, because all work since the last good checkpoint would be "
                f"lost with the next failure. Free space on that volume or mount it again, then resume the run."
            )

    def _seal(self, folder: Path, step: int, wait_written: WaitWritten) -> None:
        with self._make_books() as books:
            ledger = books.ledger(step)
            try:
                wait_written(SAVE_DEADLINE_S)
                checkpoint_folder.write_synced(folder / checkpoint_folder.LEDGER, ledger)
                info = checkpoint_folder.seal(folder, step, self._attempt)
            except OSError as error:
                self._report_failure(books, folder, step, error)
                return
            reply = books.checkpoint_durable(info)
            self._failures.clear()
            log.info("checkpoint written", extra=fields(step=step, path=info.path))
            for old in reply.removable:
                self._remove(old)

    def _report_failure(self, books: Books, folder: Path, step: int, error: BaseException) -> None:
        reason = paragraph(error)
        self._failures.append(reason)
        log.error("checkpoint failed", extra=fields(step=step, reason=reason, in_a_row=len(self._failures)))
        shutil.rmtree(folder, ignore_errors=True)  # what cannot be removed now goes at the next start
        books.checkpoint_failed(step, reason)

    def _remove(self, info: CheckpointInfo) -> None:
        try:
            checkpoint_folder.remove(self._root, info)
        except OSError as error:
            log.warning("an old checkpoint stays", extra=fields(path=info.path, reason=error))
