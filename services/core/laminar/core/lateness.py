"""Which leases are late: held for much longer than responses of this job usually take. For people, who see the names.

Nothing is decided on it: a replica that makes no progress is judged as a whole, and a long response is no fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from laminar.core.samples import Sample

LATE_AFTER_S = 60.0
"""As long as a replica may make no progress; below it nothing is late."""
LATE_FACTOR = 10.0
"""Times the median: p99 of response lengths is about ten times the median on the tasks of the papers."""
MAX_NAMED = 5
_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class LateLease:
    """One lease that is out for `held_s`."""

    sample: Sample
    held_s: float

    def __str__(self) -> str:
        where = self.sample.holder.slot if self.sample.holder else "nobody"
        tokens = f"{self.sample.length:,} tokens of version {self.sample.version}"
        return f"{self.sample.key} on {where} for {self.held_s:.0f} s ({tokens})"


class LeaseTimes:
    """Remembers how long the latest responses took, from grant to end, in wall seconds."""

    def __init__(self) -> None:
        self._took_s: deque[float] = deque(maxlen=_REMEMBERED)

    def observe(self, sample: Sample) -> None:
        """A response has ended."""
        self._took_s.append(max(0.0, sample.finished_wall_s - sample.leased_wall_s))

    @property
    def limit_s(self) -> float:
        """From here on a lease is late."""
        if not self._took_s:
            return LATE_AFTER_S
        return max(LATE_AFTER_S, LATE_FACTOR * sorted(self._took_s)[len(self._took_s) // 2])

    def late(self, running: Iterable[Sample], now_wall_s: float) -> list[LateLease]:
        """The late ones, oldest first."""
        limit_s = self.limit_s
        leases = [LateLease(sample, now_wall_s - sample.leased_wall_s) for sample in running]
        late = [lease for lease in leases if lease.held_s > limit_s]
        return sorted(late, key=lambda lease: (-lease.held_s, lease.sample.key))


def late_text(late: list[LateLease]) -> str:
    """One sentence; empty if nothing is late."""
    if not late:
        return ""
    rest = f" and {len(late) - MAX_NAMED} more" if len(late) > MAX_NAMED else ""
    return f"{len(late)} leases are late: {', '.join(map(str, late[:MAX_NAMED]))}{rest}"
