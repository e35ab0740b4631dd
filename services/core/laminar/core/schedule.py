"""Schedules: when may a new group start, and which weights does it start with?

One interface, several policies, shared by the pool and the simulator: the systems of the literature are
configurations of one program. A schedule sees numbers only and decides nothing about single trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from laminar.core.identity import Version

SCHEDULES = ("laminar", "synchronous")


@dataclass(frozen=True, slots=True)
class ScheduleView:
    """What a schedule may look at, at one lease call of one replica."""

    newest_version: Version
    newest_step: int
    """Step of the newest visible version."""
    replica_version: Version | None
    committed_step: int
    prompts_per_step: int
    max_ahead_steps: int
    started_unconsumed_groups: int


class Schedule(Protocol):
    """A policy of admission. Pure: the same view gives the same answer."""

    def must_refresh(self, view: ScheduleView) -> bool:
        """True: this replica, whose batch has ended, loads the newest version before it is granted anything."""
        ...

    def num_startable_groups(self, view: ScheduleView) -> int:
        """How many new groups may start now, over all replicas; never negative."""
        ...


class LaminarSchedule:
    """Trajectory-level asynchrony: refresh whenever a batch ended and something newer is visible; no global point.

    The only limit is back-pressure on starting groups: started and not yet consumed < maxAheadSteps steps' worth.
    """

    def must_refresh(self, view: ScheduleView) -> bool:
        return view.replica_version != view.newest_version

    def num_startable_groups(self, view: ScheduleView) -> int:
        return max(0, view.max_ahead_steps * view.prompts_per_step - view.started_unconsumed_groups)


class SynchronousSchedule:
    """Generate one global batch with v(k-1), train step k on it, load v(k) everywhere, again. Staleness 0.

    Groups of step k start only when the newest visible version belongs to the last committed step, so every
    trajectory of a batch comes from the weights that the step starts from.
    """

    def must_refresh(self, view: ScheduleView) -> bool:
        return view.replica_version != view.newest_version

    def num_startable_groups(self, view: ScheduleView) -> int:
        if view.newest_step != view.committed_step:
            return 0
        return max(0, view.prompts_per_step - view.started_unconsumed_groups)


def make_schedule(name: str) -> Schedule:
    """Raises ValueError for a name that is not in SCHEDULES."""
    match name:
        case "laminar":
            return LaminarSchedule()
        case "synchronous":
            return SynchronousSchedule()
        case _:
            raise ValueError(f"schedule {name!r} is none of {', '.join(SCHEDULES)}")
