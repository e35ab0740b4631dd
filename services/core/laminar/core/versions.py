"""The version register: which publications exist, which one replicas load, and how old a trajectory is.

    reserved --complete on enough relays--> visible
        \\--its attempt ended before that--> burned

A version is a counter that is never reused and never goes back, also across trainer recovery. Each row knows its
parent, so ages are counted along the lineage and stay right when a recovered trainer rolled some steps back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from laminar.core.lineage import Lineage


class VersionState(StrEnum):
    RESERVED = "reserved"
    VISIBLE = "visible"
    BURNED = "burned"


RELAYS_NEEDED = 2
"""A version is visible once this many relays hold it whole (one, if there is only one): a single machine's death
then cannot take back what replicas already load."""


def relays_needed(num_relays: int) -> int:
    """How many of the relays must hold a version before it is visible."""
    return min(RELAYS_NEEDED, max(1, num_relays))


@dataclass(slots=True)
class VersionRow:
    """One publication. `complete_on`: slots of relays that reported it whole and verified."""

    version: int
    step: int
    parent: int | None
    attempt: int
    state: VersionState = VersionState.RESERVED
    digest: str = ""
    complete_on: set[str] = field(default_factory=set[str])


@dataclass(frozen=True, slots=True)
class Age:
    """Staleness in training steps. `across_rollback`: the trajectory's branch was rolled back."""

    steps: int
    across_rollback: bool


class VersionConflict(ValueError):
    """A call that contradicts the register (a digest that differs, an unknown version)."""


class VersionRegister:
    """Invariant: versions only grow, by one within a generation of the pool, whose first one is `first`; `newest`
    never goes back; a visible or burned row never changes again."""

    def __init__(self, rows: Iterable[VersionRow] = (), first: int = 0) -> None:
        self._first = first
        self._rows: dict[int, VersionRow] = {row.version: row for row in sorted(rows, key=lambda row: row.version)}
        self.dirty: set[int] = set()
        self._lineage = Lineage()
        self._by_step: dict[tuple[int, int], int] = {}
        self.num_burned = 0
        for row in self._rows.values():
            self._index(row)
            self.num_burned += row.state is VersionState.BURNED

    @property
    def newest(self) -> VersionRow | None:
        """The newest visible version: what a replica loads next."""
        return next((row for row in reversed(self._rows.values()) if row.state is VersionState.VISIBLE), None)

    def row(self, version: int) -> VersionRow:
        """Raises VersionConflict for a version that was never reserved."""
        if version not in self._rows:
            raise VersionConflict(f"version {version} was never reserved")
        return self._rows[version]

    def rows(self) -> list[VersionRow]:
        """All rows, oldest first."""
        return list(self._rows.values())

    def reserve(self, attempt: int, step: int, parent: int | None) -> VersionRow:
        """A new version for (attempt, step); the same row again when the call is repeated.

        Raises VersionConflict for a parent that is unknown or of a later step.
        """
        known = self._by_step.get((attempt, step))
        if known is not None:
            return self._rows[known]
        if parent is not None and self.row(parent).step > step:
            raise VersionConflict(f"version {parent} (step {self.row(parent).step}) is no parent for step {step}")
        version = max(self._first, next(reversed(self._rows), -1) + 1)
        self._rows[version] = VersionRow(version, step, parent, attempt)
        self._index(self._rows[version])
        self.dirty.add(version)
        return self._rows[version]

    def report_complete(self, version: int, digest: str, slot: str, num_relays: int) -> bool:
        """A relay holds `version` whole. Returns True when this report makes it visible.

        Reports of burned versions count for nothing. Raises VersionConflict if relays disagree on the digest.
        """
        row = self.row(version)
        if row.state is VersionState.BURNED:
            return False
        if row.digest and row.digest != digest:
            raise VersionConflict(f"version {version} has digest {row.digest}, {slot} reports {digest}")
        row.digest = digest
        row.complete_on.add(slot)
        return self._maybe_visible(row, num_relays)

    def relay_left(self, slot: str, num_relays: int) -> list[int]:
        """A relay is gone: what only it held no longer counts. Returns versions that fewer relays make visible."""
        for row in self._rows.values():
            if row.state is VersionState.RESERVED:
                row.complete_on.discard(slot)
        return [row.version for row in self._rows.values() if self._maybe_visible(row, num_relays)]

    def burn_before(self, attempt: int) -> list[int]:
        """A new attempt began: what earlier ones had not made visible will never be."""
        burned = [r for r in self._rows.values() if r.state is VersionState.RESERVED and r.attempt < attempt]
        for row in burned:
            row.state = VersionState.BURNED
            self.num_burned += 1
            self.dirty.add(row.version)
        return [row.version for row in burned]

    def version_of_step(self, step: int, head: int | None) -> int | None:
        """The newest version of `step` on the lineage that ends in `head`."""
        found = None if head is None else self._lineage.at_or_below(step, head)
        return found if found is not None and self._rows[found].step == step else None

    def age(self, version: int, head: int, head_step: int | None = None) -> Age:
        """Training steps between `version` and `head`, along the lineage of `head` (protocols: n - j).

        A version on a branch that was rolled back at step b is (n - b) + (j - b) old, flagged. `head_step` replaces
        the head's own step where the head's version is still to come. Costs the logarithm of the number of steps.
        """
        n = self.row(head).step if head_step is None else head_step
        row = self.row(version)
        fork = self._lineage.common(version, head)
        if fork == version:
            return Age(max(0, n - row.step), across_rollback=False)
        branch = 0 if fork is None else self._rows[fork].step
        return Age(max(0, n - branch) + max(0, row.step - branch), across_rollback=True)

    def _index(self, row: VersionRow) -> None:
        self._lineage.add(row.version, row.step, row.parent)
        self._by_step[row.attempt, row.step] = row.version

    def _maybe_visible(self, row: VersionRow, num_relays: int) -> bool:
        if row.state is not VersionState.RESERVED or not row.complete_on:
            return False
        if len(row.complete_on) < relays_needed(num_relays):
            return False
        row.state = VersionState.VISIBLE
        self.dirty.add(row.version)
        return True
