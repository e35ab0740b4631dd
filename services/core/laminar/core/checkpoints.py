"""The register of durable checkpoints: which are kept, which may go, and what a new attempt restores.

Resume reads this register, never a directory listing. A new attempt that restores step N supersedes every checkpoint
after N: those belong to a branch that no longer exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class CheckpointRow:
    """`path` is relative to the checkpoint folder."""

    step: int
    attempt: int
    path: str
    manifest: tuple[tuple[str, str], ...] = ()


class CheckpointRegister:
    """Invariant: `kept` is in step order and holds at most `keep` rows."""

    def __init__(self, keep: int, kept: Iterable[CheckpointRow] = ()) -> None:
        self._keep = keep
        self.kept = sorted(kept)

    def register(self, row: CheckpointRow) -> list[CheckpointRow]:
        """A checkpoint is durable. Returns those that may be removed now; idempotent."""
        if row in self.kept:
            return []
        replaced = [old for old in self.kept if old.step == row.step]
        self.kept = sorted([old for old in self.kept if old.step != row.step] + [row])
        removable, self.kept = self.kept[: -self._keep], self.kept[-self._keep :]
        return replaced + removable

    def restore_point(self, at_most: int | None) -> CheckpointRow | None:
        """The newest kept checkpoint at or below a step; None: start from the model."""
        fits = [row for row in self.kept if at_most is None or row.step <= at_most]
        return fits[-1] if fits else None

    def supersede_after(self, step: int) -> list[CheckpointRow]:
        """An attempt restored `step`: later checkpoints are of a rolled-back branch. Returns them."""
        gone = [row for row in self.kept if row.step > step]
        self.kept = [row for row in self.kept if row.step <= step]
        return gone

    @property
    def prunable_step(self) -> int:
        """Sealed batches up to this step can never be asked for again: no kept checkpoint lies before it."""
        return self.kept[0].step if self.kept else 0
