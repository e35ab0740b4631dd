"""Redirect: where do the trajectories of a lost replica go?

A partial response continues only on a replica that generates with the same version right now, because it then keeps
that version until its own batch ends. Without such a replica the trajectory starts again from its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """`to` None: start again from the prompt (or, if ended, wait for the next replica that leases)."""

    key: SampleKey
    to: Holder | None
    reason: str


def plan_redirect(lost: Sequence[Lost], destinations: Sequence[Destination]) -> list[Redirect]:
    """One decision a lost sample, longest partials first (they cost most to lose), onto the emptiest replica.

    Samples that only wait for a grade may go to any replica and take no room. Deterministic: ties go by slot.
    """
    room = {destination.holder: destination.room for destination in destinations}
    plan: list[Redirect] = []
    for sample in sorted(lost, key=lambda sample: (-sample.length, sample.key)):
        fits = [d for d in destinations if sample.ended or (d.version == sample.version and room[d.holder] > 0)]
        if not fits:
            plan.append(Redirect(sample.key, None, "no replica runs this version with room"))
            continue
        best = min(fits, key=lambda d: (-room[d.holder], d.holder))
        if not sample.ended:
            room[best.holder] -= 1
        plan.append(Redirect(sample.key, best.holder, "grading only" if sample.ended else "same version"))
    return plan
