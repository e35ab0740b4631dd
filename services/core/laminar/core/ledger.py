"""The sample ledger: what was started, who may write it, and how each sample ended.

    lease                 -> leases    grants, refreshes, reloads of kept versions
    append, finish, grade -> writes    judged by term and holder
    lose                  -> losses    redirect, poison
    seal, commit          -> batches   ready groups, dynamic sampling, rollbacks

The pool drives it: the ledger decides and changes its objects, the store writes the rows named in `drain()`, then
the answer goes out. It holds what has not ended (and batches not yet consumed); what has ended lives in the store.

Invariants, kept under every order of calls:
  * admitted = consumed + discarded + open;
  * only the holder of a sample's current term writes it, and a partial never shrinks within its terms;
  * a sample's version is bound at the grant and changes only by a counted restart;
  * a sealed batch never changes, and no sample is in two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from laminar.core.accounts import Accounts
from laminar.core.batches import Batches
from laminar.core.decisions import Changes, Counters, LeaseDecision, LedgerPlan, Loss, Moved
from laminar.core.identity import GroupKey, SampleKey
from laminar.core.leases import Leases
from laminar.core.losses import Losses
from laminar.core.prompts import StreamPosition
from laminar.core.redirect import Destination
from laminar.core.samples import Group, Holder, Sample, SealedBatch
from laminar.core.schedule import Schedule
from laminar.core.versions import VersionRegister
from laminar.core.writes import Writes


class Ledger:
    """See the module. `register` is shared with the pool; `kept` are the versions that relays hold, None while that
    is not known."""

    def __init__(self, plan: LedgerPlan, schedule: Schedule, register: VersionRegister) -> None:
        self._accounts = Accounts(plan)
        self._batches = Batches(self._accounts)
        self._leases = Leases(self._accounts, schedule, register)
        self._losses = Losses(self._accounts, self._batches)
        self.writes = Writes(self._accounts, self._batches, register)

    def restore(
        self,
        groups: Iterable[Group],
        batches: Iterable[SealedBatch],
        counters: Counters,
        position: StreamPosition,
        committed_step: int,
    ) -> None:
        """Continue from stored rows: groups that have not ended, sealed batches not yet consumed, totals."""
        self._accounts.restore(groups, batches, counters, position, committed_step)

    def drain(self) -> Changes:
        """What changed since the last call, each row once, in its newest form."""
        return self._accounts.drain()

    # --- reading ------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> LedgerPlan:
        return self._accounts.plan

    @property
    def counters(self) -> Counters:
        return self._accounts.counters

    @property
    def committed_step(self) -> int:
        """The last consumed step."""
        return self._accounts.committed_step

    @property
    def finished(self) -> bool:
        return self.committed_step >= self.plan.steps

    @property
    def stream_position(self) -> StreamPosition:
        return self._accounts.stream.position

    @property
    def groups(self) -> Mapping[GroupKey, Group]:
        """Started, and neither consumed nor discarded: what back-pressure counts."""
        return self._accounts.groups

    @property
    def batches(self) -> Mapping[int, SealedBatch]:
        """Sealed and not consumed."""
        return self._accounts.batches

    @property
    def num_open(self) -> int:
        """Admitted samples that have not ended."""
        return self._accounts.num_open

    def sample(self, key: SampleKey) -> Sample | None:
        """None if it was never admitted, or has ended with its group."""
        return self._accounts.sample(key)

    def held_by(self, holder: Holder) -> list[Sample]:
        """What this life of a replica may write now."""
        return self._accounts.held_by(holder)

    def running(self) -> dict[Holder, list[Sample]]:
        """What each life that holds anything is to generate now."""
        return self._accounts.holders()

    def unfinished_versions(self) -> list[int]:
        """Versions that partial responses need: those with most of them first, the newer first of equals."""
        counts = self._accounts.versions_needed()
        return sorted(counts, key=lambda version: (-counts[version], -version))

    # --- replicas -----------------------------------------------------------------------------------------------

    def lease(
        self, holder: Holder, version: int | None, now_wall_s: float, kept: frozenset[int] | None = frozenset()
    ) -> LeaseDecision:
        """Answer a replica whose batch has ended."""
        return self._leases.lease(holder, version, now_wall_s, kept)

    def adopt_ungraded(self, holder: Holder) -> list[Sample]:
        """Responses that nobody grades are this replica's from now on; tell it by a command."""
        return self._leases.adopt_ungraded(holder)

    def lose(
        self,
        source: Holder,
        destinations: Iterable[Destination],
        reason: str,
        *,
        loss: Loss = Loss.SUSPECT,
        kept: frozenset[int] | None = frozenset(),
    ) -> list[Moved]:
        """A replica is suspect, dead, superseded or drained: each sample it holds goes elsewhere or waits."""
        self._leases.forget(source)
        return self._losses.lose(source, destinations, loss, kept, reason)

    def absolve(self, source: Holder) -> None:
        """A suspect is heard again in the same life."""
        self._losses.absolve(source)

    def restart_unkept(self, kept: frozenset[int]) -> list[tuple[Sample, int]]:
        """Waiting partials whose version no relay holds any more start again; each with its number of lost tokens."""
        return self._leases.restart_unkept(kept)

    # --- the trainer --------------------------------------------------------------------------------------------

    def seal(self, step: int) -> SealedBatch | None:
        """See Batches.seal."""
        return self._batches.seal(step)

    def batch_groups(self, step: int) -> list[Group]:
        """See Batches.groups_of."""
        return self._batches.groups_of(step)

    def commit(self, step: int) -> list[Group]:
        """See Batches.commit."""
        return self._batches.commit(step)

    def roll_back(self, restored_step: int, consumed: Iterable[tuple[SealedBatch, list[Group]]]) -> None:
        """See Batches.roll_back."""
        self._batches.roll_back(restored_step, consumed)
