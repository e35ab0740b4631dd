"""One attempt as its loop sees it: the same calls on every rank; only rank 0 speaks for the group.

    restore, begin -> publish -> (take -> slice -> train -> commit -> publish -> checkpoint)* -> finish

A call that all ranks must make together says so; what rank 0 decides is broadcast.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from laminar.core.progress import Phase
from laminar.shell.handover import hand_over
from laminar.shell.logs import fields
from laminar.trainer import checkpoint_folder
from laminar.trainer.books import Books
from laminar.trainer.failures import InputFailure
from laminar.trainer.publish import HandOver, Publisher, Sender
from laminar.trainer.pulse import Pulse
from laminar.trainer.saving import BeginSave, Checkpointer, Choice, choose
from laminar.trainer.settings import TrainerSettings
from laminar.wire.dataplane import BatchSlice
from laminar.wire.manifest import TensorEntry
from laminar.wire.messages import TakeReply, TakeStatus

log = logging.getLogger(__name__)


T = TypeVar("T")


class Group(Protocol):
    """The ranks of this attempt."""

    rank: int
    size: int

    @property
    def is_first(self) -> bool: ...

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value on every rank."""
        ...

    def meet(self) -> None:
        """Returns when every rank has come here."""
        ...


class Trained(Protocol):
    """What is trained: weights, and what else a checkpoint holds. Its calls are collectives."""

    @property
    def entries(self) -> list[TensorEntry]:
        """How the weights lie in a publication."""
        ...

    def restore(self, folder: Path) -> int:
        """Loads a verified checkpoint; returns its step. Raises InputFailure."""
        ...

    def copy_weights(self, buffer: bytearray | None) -> None:
        """Into a buffer of `layout_bytes(entries)`; None on the ranks that do not publish."""
        ...

    def write_model(self, out: Path) -> None:
        """A Hugging Face folder, whole or not at all. Raises OSError."""
        ...


class Attempt:
    """Owns the group's ties: books, publisher (rank 0), checkpointer. `close` at the end."""

    def __init__(
        self,
        settings: TrainerSettings,
        ranks: Group,
        trained: Trained,
        begin_save: BeginSave,
        keep: int,
        pulse: Pulse,
        stop_asked: Callable[[], bool],
        hand_over: HandOver = hand_over,
    ) -> None:
        """`keep`: failed saves in a row that end the attempt."""
        self._settings = settings
        self._trained = trained
        self._pulse = pulse
        self._stop_asked = stop_asked
        self._hand_over = hand_over
        self._ranks = ranks
        self._books = Books(settings, f"rank-{self._ranks.rank}")
        self._checkpointer = Checkpointer(
            settings.checkpoints, settings.attempt, keep, begin_save, lambda: Books(settings, "checkpoint"),
            is_first=ranks.is_first,
        )  # fmt: skip
        self._publisher: Publisher | None = None
        self._checkpointed_step = -1
        self.times_s: dict[str, float] = {"wait_s": 0.0, "stall_s": 0.0, "handover_wait_s": 0.0, "checkpoint_s": 0.0}
        """Of the time since the last commit: waiting for a batch, copying weights out, waiting until the master has
        the version before, copying a checkpoint."""

    def restore(self) -> int:
        """Collective. Loads the checkpoint that the pool names (or an older kept one if that is damaged) and begins
        the attempt there. Returns the restored step; 0: from the model. Raises InputFailure."""
        choice = self._ranks.broadcast(self._choose() if self._ranks.is_first else None)
        step = 0
        if choice.checkpoint is not None:
            folder = self._settings.checkpoints / choice.checkpoint.path
            step = self._trained.restore(folder)
            if step != choice.checkpoint.step:
                raise InputFailure(f"The checkpoint {folder} is of step {step}, not {choice.checkpoint.step}.")
            self._checkpointed_step = step
        if self._ranks.is_first:
            begun = self._books.begin(step, choice.num_damaged)
            log.info(
                "attempt begins",
                extra=fields(attempt=self._settings.attempt, restored_step=step, damaged=choice.num_damaged),
            )
            self._publisher = Publisher(
                lambda: Books(self._settings, "publisher"),
                Sender(self._settings.common.job_uid, self._settings.common.token, self._settings.attempt),
                self._trained.entries,
                begun.restored_version,
                self._hand_over,
            )
        return step

    def take(self, step: int) -> TakeStatus:
        """Collective. Waits for batch `step`; BATCH, STOP or DONE."""
        started_s = time.monotonic()
        while True:
            self._pulse.mark(Phase.WAIT)
            status = TakeStatus(self._ranks.broadcast(self._ask(step).status.value if self._ranks.is_first else None))
            if status is not TakeStatus.WAIT:
                self.times_s["wait_s"] += time.monotonic() - started_s
                return status

    def slice(self, step: int) -> BatchSlice:
        """Collective. This rank's whole groups of batch `step`; when all have theirs, the step begins."""
        groups = self._books.slice(step, self._ranks.rank, self._ranks.size)
        self._begin(Phase.STEP)
        return groups

    def commit(self, step: int, stats: dict[str, float]) -> None:
        """Marks the batch consumed; the statistics are rank 0's, over all ranks."""
        self._pulse.mark(Phase.WAIT)
        if self._ranks.is_first:
            self._books.commit(step, stats | self.times_s)
            log.info("step", extra=fields(step=step, **stats, **self.times_s))
        self.times_s = dict.fromkeys(self.times_s, 0.0)

    def publish(self, step: int) -> None:
        """Collective. Hands the weights of `step` to the publisher and goes on."""
        buffer = None
        self._pulse.mark(Phase.WAIT)
        if self._publisher is not None:
            started_s = time.monotonic()
            buffer = self._publisher.buffer()
            self.times_s["handover_wait_s"] += time.monotonic() - started_s
        self._begin(Phase.SAVE)
        started_s = time.monotonic()
        self._trained.copy_weights(buffer)
        if self._publisher is not None:
            assert buffer is not None
            self._publisher.submit(step, buffer)
        self.times_s["stall_s"] += time.monotonic() - started_s

    def checkpoint(self, step: int) -> None:
        """Collective. Saves the committed step, unless it is saved already."""
        if step != self._checkpointed_step:
            self._pulse.mark(Phase.SAVE)
            self.times_s["checkpoint_s"] += self._checkpointer.save(step)
            self._checkpointed_step = step

    def finish(self, step: int, *, done: bool) -> None:
        """Collective. The last checkpoint; after the job's last step also the model folder and a visible version."""
        if step > 0:
            self.checkpoint(step)
        self._pulse.mark(Phase.SAVE)
        self._checkpointer.finish()
        self._checkpointer.check()
        if done:
            if self._settings.model_out is not None:
                self._trained.write_model(self._settings.model_out)
                log.info("model written", extra=fields(folder=self._settings.model_out))
            self._pulse.mark(Phase.WAIT)
            if self._publisher is not None:
                self._publisher.wait_visible()

    def close(self) -> None:
        """After an orderly end. Raises what ended the publisher's thread."""
        if self._publisher is not None:
            self._publisher.close()

    def _begin(self, phase: Phase) -> None:
        """Collective. The end of a WAIT: no rank is judged by its work while another one still waits."""
        self._ranks.meet()
        self._pulse.mark(phase)

    def _choose(self) -> Choice:
        checkpoint_folder.remove_unfinished(self._settings.checkpoints)
        return choose(self._settings.checkpoints, self._books.resume(self._settings.restore_step))

    def _ask(self, step: int) -> TakeReply:
        """Rank 0: what to do next."""
        assert self._publisher is not None, "restore first"
        self._publisher.check()
        self._checkpointer.check()
        return TakeReply(status=TakeStatus.STOP) if self._stop_asked() else self._books.take(step)
