"""Leases: what a replica gets whose batch has ended.

it holds samples still   -> those again: the earlier answer was lost on the way
partials of its version  -> those: they continue where they stopped
partials of a version that a relay keeps -> load that version (one replica a lease's worth of them)
a newer version          -> load that
else                     -> samples of started groups, then new groups as far as the schedule allows
"""

from __future__ import annotations

from collections import Counter

from laminar.core.accounts import Accounts
from laminar.core.decisions import Grant, LeaseDecision, Refresh, Wait
from laminar.core.identity import Version
from laminar.core.samples import DiscardReason, Holder, Sample, SampleEvent, SampleState
from laminar.core.schedule import Schedule, ScheduleView
from laminar.core.versions import VersionRegister

MAX_RELOADS = 3
"""Replicas that come back without the kept version that they should have loaded; then its partials start again."""


class Leases:
    """Invariant: a sample's version is bound at the grant, and a group starts whole on one replica."""

    def __init__(self, accounts: Accounts, schedule: Schedule, register: VersionRegister) -> None:
        self._accounts, self._schedule, self._register = accounts, schedule, register
        self._loaders: dict[Holder, int] = {}
        """Who was told to load which older version; forgotten by a restart, which only tells another one too."""
        self._failed_loads: Counter[int] = Counter()

    def lease(
        self, holder: Holder, version: int | None, now_wall_s: float, kept: frozenset[int] | None
    ) -> LeaseDecision:
        """`kept`: versions that relays hold; None: not known yet."""
        running = [s for s in self._accounts.held_by(holder) if s.state is SampleState.LEASED]
        if running and version is not None and all(sample.version == version for sample in running):
            return Grant(version, tuple(running))
        newest = self._register.newest
        if newest is None or self._accounts.committed_step >= self._accounts.plan.steps:
            return Wait()
        self._note_load(holder, version)
        if version is not None and version != newest.version:
            parked = self._take_waiting(holder, version, now_wall_s, parked_only=True)
            if parked:
                return Grant(version, tuple(parked))
        reload = self._reload(holder, version, kept)
        if reload is not None:
            return reload
        view = self._view(version, newest.version, newest.step)
        if version is None or self._schedule.must_refresh(view):
            return Refresh(newest.version)
        samples = self._take_waiting(holder, version, now_wall_s)
        plan = self._accounts.plan
        startable = min(plan.groups_per_lease - len({s.key.group for s in samples}), self._startable(view))
        for _ in range(startable):
            samples += self._start_group(holder, version, now_wall_s)
        return Grant(version, tuple(samples)) if samples else Wait()

    def forget(self, holder: Holder) -> None:
        """This life is lost: what it should load, another one may."""
        self._loaders.pop(holder, None)

    def adopt_ungraded(self, holder: Holder) -> list[Sample]:
        """Responses that nobody grades, for this replica. Not part of a lease: the answer to one may be lost, and the
        next call would not say so."""
        orphans = [sample for _, sample in sorted(self._accounts.waiting.items()) if sample.is_orphan]
        return [self._grant(sample, holder, 0, 0.0) for sample in orphans]

    def restart_unkept(self, kept: frozenset[int]) -> list[tuple[Sample, int]]:
        """Partials whose version no relay holds any more start again; each with the number of its lost tokens."""
        newest = self._register.newest
        safe = kept if newest is None else kept | {newest.version}
        return self._restart_parked({v for v in self._parked() if v not in safe})

    # --- versions that are kept for partials ----------------------------------------------------------------------

    def _parked(self) -> Counter[int]:
        """Versions that wait for a replica, with the number of groups that need each."""
        pairs = {(s.version, s.key.group) for s in self._accounts.waiting.values() if s.is_parked}
        return Counter(version for version, _ in pairs if version is not None)

    def _note_load(self, holder: Holder, version: int | None) -> None:
        wanted = self._loaders.pop(holder, None)
        if wanted is None or wanted == version:
            return
        self._failed_loads[wanted] += 1
        if self._failed_loads[wanted] >= MAX_RELOADS:
            self._restart_parked({wanted})

    def _reload(self, holder: Holder, version: int | None, kept: frozenset[int] | None) -> Refresh | None:
        """An older version for this replica, oldest first: its groups are what a batch waits for longest."""
        newest = self._register.newest
        for wanted, num_groups in sorted(self._parked().items()):
            if wanted == version or (newest is not None and wanted == newest.version):
                continue
            loaders = sum(each == wanted for each in self._loaders.values())
            if kept is None or wanted not in kept or loaders * self._accounts.plan.groups_per_lease >= num_groups:
                continue
            self._loaders[holder] = wanted
            num_parked = sum(s.is_parked and s.version == wanted for s in self._accounts.waiting.values())
            return Refresh(wanted, num_parked)
        return None

    def _restart_parked(self, versions: set[int]) -> list[tuple[Sample, int]]:
        lost = [s for _, s in sorted(self._accounts.waiting.items()) if s.is_parked and s.version in versions]
        restarted = [(sample, sample.length) for sample in lost]
        for sample in lost:
            self._accounts.restart(sample)
        for version in versions:
            del self._failed_loads[version]
        return restarted

    # --- grants -------------------------------------------------------------------------------------------------

    def _view(self, version: int | None, newest_version: int, newest_step: int) -> ScheduleView:
        plan = self._accounts.plan
        return ScheduleView(
            newest_version=Version(newest_version),
            newest_step=newest_step,
            replica_version=None if version is None else Version(version),
            committed_step=self._accounts.committed_step,
            prompts_per_step=plan.prompts_per_step,
            max_ahead_steps=plan.max_ahead_steps,
            started_unconsumed_groups=len(self._accounts.groups),
        )

    def _startable(self, view: ScheduleView) -> int:
        plan, accounts = self._accounts.plan, self._accounts
        usable = (plan.steps - accounts.committed_step) * plan.prompts_per_step - len(accounts.groups)
        return max(0, min(usable, self._schedule.num_startable_groups(view)))

    def _take_waiting(
        self, holder: Holder, version: int, now_wall_s: float, *, parked_only: bool = False
    ) -> list[Sample]:
        """Samples of started groups come before new ones: partials of this version, then restarts."""
        fits = [
            sample
            for _, sample in sorted(self._accounts.waiting.items())
            if (sample.version == version if sample.is_parked else not (parked_only or sample.is_orphan))
        ]
        chosen = sorted(fits, key=lambda sample: not sample.is_parked)  # stable: by key within
        groups = list(dict.fromkeys(sample.key.group for sample in chosen))[: self._accounts.plan.groups_per_lease]
        return [self._grant(s, holder, version, now_wall_s) for s in chosen if s.key.group in groups]

    def _start_group(self, holder: Holder, version: int, now_wall_s: float) -> list[Sample]:
        """Draw prompts until one fits; those over the limit are admitted and discarded at once."""
        for _ in range(self._accounts.plan.num_prompts):
            group = self._accounts.admit_group()
            if group.key.prompt not in self._accounts.plan.too_long:
                return [self._grant(sample, holder, version, now_wall_s) for sample in group.samples]
            detail = "the prompt is longer than data.maxPromptTokens"
            self._accounts.discard_group(group, DiscardReason.TOO_LONG, detail)
        return []

    def _grant(self, sample: Sample, holder: Holder, version: int, now_wall_s: float) -> Sample:
        sample.move_to(SampleEvent.GRANT)
        sample.term += 1
        if sample.state is SampleState.LEASED:
            sample.version = version
            sample.leased_wall_s = now_wall_s
        self._accounts.assign(sample, holder)
        return sample
