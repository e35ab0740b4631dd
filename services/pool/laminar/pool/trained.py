"""The record of training: which attempt trains, the steps of the surviving lineage, and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

from laminar.core.checkpoints import CheckpointRegister, CheckpointRow
from laminar.core.samples import SealedBatch
from laminar.pool import rows
from laminar.pool.journal import Journal
from laminar.pool.restore import Stored
from laminar.pool.signals import Clock
from laminar.wire.messages import StepRow

KEPT, REMOVABLE = "kept", "removable"
MAX_REMOVABLE = 64
"""The trainer deletes them at once; older ones were told before."""


class Trained:
    """Invariant: what it says is in the journal; a step's row exists if and only if the step is committed."""

    def __init__(self, stored: Stored, keep: int, journal: Journal, clock: Clock) -> None:
        self._journal, self._clock = journal, clock
        self.attempt = int(stored.meta.get("attempt", 0))
        self.restored_step = int(stored.meta.get("restored_step", 0))
        self.pruned_step = int(stored.meta.get("pruned_step", 0))
        """Responses of steps 2 to this one are gone."""
        self.taken_step = 0
        """The batch that the present attempt has taken and not committed; 0: none."""
        self.steps = {row.step: row for row in stored.steps}
        self.checkpoints = CheckpointRegister(keep, [row for row, state in stored.checkpoints if state == KEPT])
        self.removable = [row for row, state in stored.checkpoints if state == REMOVABLE]

    @property
    def durable_step(self) -> int | None:
        """Step of the newest registered checkpoint."""
        return self.checkpoints.kept[-1].step if self.checkpoints.kept else None

    def begin(self, attempt: int, restored_step: int) -> None:
        """A later attempt trains from here on; what it will do again is not done."""
        self.write_checkpoints(self.checkpoints.supersede_after(restored_step))
        self.steps = {number: row for number, row in self.steps.items() if number <= restored_step}
        self.attempt, self.restored_step, self.taken_step = attempt, restored_step, 0
        self._journal.write(
            rows.DeleteAbove("steps", restored_step),
            rows.meta("attempt", attempt),
            rows.meta("restored_step", restored_step),
        )

    def write_batch(self, batch: SealedBatch) -> None:
        self._journal.write(rows.batch(batch, self._clock.wall_s()))

    def write_step(self, row: StepRow) -> None:
        self.steps[row.step] = row
        self.taken_step = 0
        self._journal.write(rows.step(row))

    def write_checkpoints(self, removable: Iterable[CheckpointRow]) -> None:
        """The register as it is now; those in `removable` may be deleted by the trainer."""
        kept = {row.path for row in self.checkpoints.kept}
        gone = {row.path: row for row in [*self.removable, *removable] if row.path not in kept}
        self.removable = list(gone.values())[-MAX_REMOVABLE:]
        self._journal.write(*(rows.checkpoint(row, REMOVABLE) for row in gone.values()))
        self._journal.write(*(rows.checkpoint(row, KEPT) for row in self.checkpoints.kept))

    def prune_to(self, step: int, num_rows_steps: int) -> None:
        """Responses of steps up to this one can never be asked for again; the rows of so many steps stay."""
        if step > self.pruned_step:
            new = range(max(2, self.pruned_step + 1), step + 1)
            self._journal.write(*(rows.PruneStep(each) for each in new))
            self._journal.write(*(rows.FoldStep(each - num_rows_steps) for each in new if each - num_rows_steps >= 2))
            self._journal.write(rows.meta("pruned_step", step))
            self.pruned_step = step
