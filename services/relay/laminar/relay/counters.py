"""What the data threads count; the agent shows it as metrics."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CountersView:
    """A consistent copy. All numbers only grow, except `publication_lag_s` and `forward_bytes_per_s`
    (of the last version)."""

    received_bytes: int
    forwarded_bytes: int
    completed_versions: int
    aborted_versions: int
    superseded_versions: int
    """Complete here, but dropped before they went down the chain: a newer one came first."""
    slots_reused_under_reader: int
    bypasses: int
    """Lost neighbours that this relay passed by."""
    resumed_versions: int
    """Half versions that another upstream went on with."""
    reader_deadlines: int
    """Readers that held a slot for longer than readDeadlineSeconds."""
    pulled_bytes: int
    """Sent to engines by TCP."""
    forward_bytes_per_s: float
    """Of the version that went down the chain last, while it went."""
    publication_lag_s: float
    """From the manifest's arrival to the last verified byte, for the newest version."""
    refused: dict[str, int]
    """Connections closed by us, by reason."""
    declined: dict[str, int]
    """Announced versions that were not taken, by verdict."""


@dataclass(slots=True)
class Counters:
    """Thread-safe."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _numbers: Counter[str] = field(default_factory=Counter[str])
    _refused: Counter[str] = field(default_factory=Counter[str])
    _declined: Counter[str] = field(default_factory=Counter[str])
    _lag_s: float = 0.0
    _hop_bytes_per_s: float = 0.0

    def received(self, num_bytes: int) -> None:
        self._add("received_bytes", num_bytes)

    def forwarded(self, num_bytes: int) -> None:
        self._add("forwarded_bytes", num_bytes)

    def completed(self, lag_s: float) -> None:
        with self._lock:
            self._numbers["completed_versions"] += 1
            self._lag_s = lag_s

    def aborted(self) -> None:
        self._add("aborted_versions", 1)

    def superseded(self) -> None:
        self._add("superseded_versions", 1)

    def bypassed(self) -> None:
        self._add("bypasses", 1)

    def resumed(self) -> None:
        self._add("resumed_versions", 1)

    def reader_overdue(self) -> None:
        self._add("reader_deadlines", 1)

    def pulled(self, num_bytes: int) -> None:
        self._add("pulled_bytes", num_bytes)

    def hop_done(self, bytes_per_s: float) -> None:
        with self._lock:
            self._hop_bytes_per_s = bytes_per_s

    def reused_under_reader(self) -> None:
        self._add("slots_reused_under_reader", 1)

    def refused(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] += 1

    def declined(self, verdict: str) -> None:
        with self._lock:
            self._declined[verdict] += 1

    def view(self) -> CountersView:
        with self._lock:
            numbers = self._numbers
            return CountersView(
                received_bytes=numbers["received_bytes"],
                forwarded_bytes=numbers["forwarded_bytes"],
                completed_versions=numbers["completed_versions"],
                aborted_versions=numbers["aborted_versions"],
                superseded_versions=numbers["superseded_versions"],
                slots_reused_under_reader=numbers["slots_reused_under_reader"],
                bypasses=numbers["bypasses"],
                resumed_versions=numbers["resumed_versions"],
                reader_deadlines=numbers["reader_deadlines"],
                pulled_bytes=numbers["pulled_bytes"],
                forward_bytes_per_s=self._hop_bytes_per_s,
                publication_lag_s=self._lag_s,
                refused=dict(self._refused),
                declined=dict(self._declined),
            )

    def _add(self, name: str, amount: int) -> None:
        with self._lock:
            self._numbers[name] += amount
