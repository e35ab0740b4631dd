"""How often a slot may come back, and when: backoff, crash loops and the trainer's budget of attempts.

exit after a long life -> at once    quick crash -> 0, 2, 4, 8 .. 30 s    5 in a row -> job fails
trainer: failure -> 1, 2, 4 .. 30 s    more failures than backoffLimit without a newer checkpoint -> job fails
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from laminar.core.identity import Role

QUICK_CRASH_S = 20.0
"""A life shorter than this did no work: imports alone take several seconds."""
CRASH_LOOP = 5
"""Quick crashes in a row that end the job: with the backoff between them they span half a minute and more."""
BACKOFF_FIRST_S = 1.0
BACKOFF_MOST_S = 30.0
DISRUPTIONS_PER_FAILURE = 10
"""Exits that were not the program's fault are free up to this many times the limit, so that nothing loops for ever."""


@dataclass(frozen=True, slots=True)
class Restarts:
    """One slot's memory across its lives."""

    quick_crashes: int = 0
    """In a row."""
    failures: int = 0
    """Trainer: failed attempts since a newer checkpoint became durable."""
    disruptions: int = 0
    """Trainer: likewise, of attempts that were taken away from it."""
    not_before_s: float = 0.0


def after_exit(
    before: Restarts, role: Role, lived_s: float, now_s: float, *, served: bool = True, disrupted: bool = False
) -> Restarts:
    """A life ended that should have gone on.

    `served`: it got as far as to register (the pool: to answer). `disrupted`: it was the machine's or our doing (a
    lost node, a silent member), which is nobody's fault unless it never served.
    """
    if role is Role.TRAINER:
        if disrupted and served:
            return replace(before, disruptions=before.disruptions + 1, not_before_s=now_s)
        failures = before.failures + 1
        return replace(before, failures=failures, not_before_s=now_s + _doubling_s(failures))
    if served and (disrupted or lived_s >= QUICK_CRASH_S):
        return replace(before, quick_crashes=0, not_before_s=now_s)
    crashes = before.quick_crashes + 1
    # The first one is most often a kill from outside, and then waiting helps nobody.
    wait_s = _doubling_s(crashes) if crashes > 1 else 0.0
    return replace(before, quick_crashes=crashes, not_before_s=now_s + wait_s)


def after_progress(before: Restarts) -> Restarts:
    """A newer checkpoint is durable: the trainer's budget is whole again."""
    return replace(before, failures=0, disruptions=0)


def exhausted(restarts: Restarts, role: Role, backoff_limit: int) -> str | None:
    """Why this slot may not come back, as the end of a sentence about it; None: it may."""
    if role is not Role.TRAINER:
        crashes = restarts.quick_crashes
        return f"failed {crashes} times in a row at its start" if crashes >= CRASH_LOOP else None
    if restarts.failures > backoff_limit:
        return f"failed {restarts.failures} times without a newer checkpoint (trainer.backoffLimit is {backoff_limit})"
    if restarts.disruptions > DISRUPTIONS_PER_FAILURE * max(1, backoff_limit):
        return f"was disrupted {restarts.disruptions} times without a newer checkpoint"
    return None


def _doubling_s(nth: int) -> float:
    """1, 2, 4 .. 30 s for nth = 1, 2, 3 .."""
    return min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2.0 ** min(nth - 1, 10))
