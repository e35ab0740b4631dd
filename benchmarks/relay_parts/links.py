"""Links of a chosen speed, in user space: what the paper's formula speaks of, on one host.

Each host has one network interface. A message occupies it for T_s, each byte for T_b, one after the other, whatever
connection they belong to; the last byte of a message leaves exactly when its time is over. A message is what is sent
up to and with the first part that does not say that more follows: a chunk with its header, an announcement. Replies
and signs of life travel against the data on the other direction of the link and cost nothing there.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from laminar.shell.transport import Conn, Watch, connect

PART_BYTES = 128 << 10
"""A chunk trickles in parts of this size: 3 ms at 40 MB/s."""
QUEUED_S = 10e-3
"""What an interface's queue holds: within a message, the wire does not pause because a thread woke up late."""


@dataclass(frozen=True)
class LinkSpeed:
    byte_s: float
    message_s: float


class Interface:
    """Of one host; thread-safe."""

    def __init__(self, speed: LinkSpeed) -> None:
        self.speed = speed
        self._lock = threading.Lock()
        self._free_s = 0.0

    def occupy(self, duration_s: float, queued_s: float = 0.0) -> float:
        """The moment when this piece has gone, all before it first. It may have been queued `queued_s` ago."""
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic() - queued_s) + duration_s
            return self._free_s

    def dial(self, address: str, deadline_s: float, /) -> Conn:
        return PacedConn(connect(address, deadline_s), self)


class PacedConn:
    """A connection whose sends take the time of the interface."""

    def __init__(self, conn: Conn, interface: Interface) -> None:
        self.peer = conn.peer
        self._conn = conn
        self._interface = interface
        self._in_message = False
        self.recv_into, self.recv_ready, self.say = conn.recv_into, conn.recv_ready, conn.say
        self.is_open, self.fileno, self.interrupt, self.close = conn.is_open, conn.fileno, conn.interrupt, conn.close

    def send(
        self, view: bytes | memoryview, deadline_s: float, *, more: bool = False, watch: Watch | None = None
    ) -> None:
        whole = memoryview(view).cast("B")
        speed = self._interface.speed
        if not self._in_message:
            self._interface.occupy(speed.message_s)
        self._in_message = more
        for start in range(0, len(whole), PART_BYTES):
            part = whole[start : start + PART_BYTES]
            left_s = self._interface.occupy(len(part) * speed.byte_s, QUEUED_S) - time.monotonic()
            if left_s > 0:
                time.sleep(left_s)
            more_comes = more or start + PART_BYTES < len(whole)
            self._conn.send(part, deadline_s, more=more_comes, watch=watch)
