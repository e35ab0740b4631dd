"""Redirect: where do the trajectories of a lost replica go?

A partial response continues only with the version that it was begun with: on a replica that runs this version right
now and has room; else on the next one that becomes idle and loads it, as long as a relay keeps it; else not at all:
it starts again from its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laminar.core.decisions import Fate
from laminar.core.identity import SampleKey
from laminar.core.samples import Holder


@dataclass(frozen=True, slots=True)
class Destination:
    """A live replica. `version` is what its running samples are bound to; None: it runs nothing. `room`: how many more
    trajectories it takes."""

    holder: Holder
    version: int | None
    room: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A sample whose replica is gone. `ended`: generation is over, only grading is left."""

    key: SampleKey
    version: int
    length: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Redirect:
    """`to` is set for MOVED only."""

    key: SampleKey
    fate: Fate
    to: Holder | None
    reason: str


def plan_redirect(
    lost: Sequence[Lost], destinations: Sequence[Destination], kept: frozenset[int] | None = frozenset()
) -> list[Redirect]:
    """One decision a lost sample, longest partials first (they cost most to lose), onto the emptiest replica.

    Samples that only wait for a grade may go to any replica and take no room. `kept`: versions that relays hold; None:
    not known yet, so nothing is given up. Deterministic: ties go by slot.
    """
    room = {destination.holder: destination.room for destination in destinations}
    plan: list[Redirect] = []
    for sample in sorted(lost, key=lambda sample: (-sample.length, sample.key)):
        fits = [d for d in destinations if sample.ended or (d.version == sample.version and room[d.holder] > 0)]
        if not fits:
            plan.append(_without_replica(sample, kept))
            continue
        best = min(fits, key=lambda d: (-room[d.holder], d.holder))
        if not sample.ended:
            room[best.holder] -= 1
        plan.append(Redirect(sample.key, Fate.MOVED, best.holder, "grading only" if sample.ended else "same version"))
    return plan


def _without_replica(sample: Lost, kept: frozenset[int] | None) -> Redirect:
    if sample.ended:
        return Redirect(sample.key, Fate.UNGRADED, None, "no replica to grade it")
    if not sample.length:
        # Nothing is lost by a restart, and newer weights are better than a reload.
        return Redirect(sample.key, Fate.RESTARTED, None, "no token of it is known")
    if kept is None or sample.version in kept:
        return Redirect(sample.key, Fate.PARKED, None, f"a relay keeps version {sample.version}")
    return Redirect(sample.key, Fate.RESTARTED, None, f"nobody has version {sample.version} any more")
