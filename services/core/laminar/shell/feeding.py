"""Sending side of a data connection, shared by the trainer and the relays: one version at a time, and who lives.

    announce -> Answer(have) -> chunk have .. n-1 -> Stored          forward
               Beat  Beat  Beat ...                                  back, as long as the receiver lives

A stopped process and a silently broken link keep a TCP connection open for minutes, so life is shown above it: the
receiver beats while a version is under way, and a sender that has nothing to send pings.
"""

from __future__ import annotations

import select
import struct
import time
from typing import TypeVar

import msgspec

from laminar.shell.transport import SILENCE_S, BadPeer, Conn, PeerLost, Refusal
from laminar.wire.codec import frame
from laminar.wire.links import (
    CHUNK_HEADER,
    FRAME_ABORT,
    FRAME_PING,
    MANIFEST_MESSAGE_BYTES,
    SMALL_MESSAGE_BYTES,
    Announce,
    Answer,
    Beat,
    Replaced,
    Reply,
    Stored,
)
from laminar.wire.manifest import Manifest

_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
R = TypeVar("R", Answer, Stored)

BEAT_S = 0.05
"""Between two signs of life, in both directions."""
SLICE_S = 0.02
"""How often a waiting thread looks around; a dead neighbour is noticed within this."""
LIFE_LIMIT_S = 0.25
"""Silence of a neighbour whose beats came in time so far: five of them are missing."""
LIFE_LIMIT_MOST_S = 2.0
"""The same at most, for a neighbour whose beats come late or in bursts."""
GAPS_ALLOWED = 4
"""A silence this many times as long as the longest recent one is no delay any more."""


class LinkReplaced(PeerLost):
    """The receiver has a better upstream. It is well; so is this sender."""


class Life:
    """Is the other side alive? `look` often, `heard` at each sign of life.

    Adaptive: the limit grows with the longest gap of late, so that a slow or busy but live neighbour is not given up.
    The clock stops while this process does: after a SIGSTOP, or starved of CPU, it must not blame the others.
    """

    def __init__(self) -> None:
        self._silent_s = 0.0
        self._looked_s = time.monotonic()
        self._longest_gap_s = 0.0

    @property
    def limit_s(self) -> float:
        return min(LIFE_LIMIT_MOST_S, max(LIFE_LIMIT_S, GAPS_ALLOWED * self._longest_gap_s))

    @property
    def silent_s(self) -> float:
        return self._silent_s

    def heard(self) -> None:
        self._longest_gap_s = max(self._silent_s, 0.9 * self._longest_gap_s)
        self._silent_s = 0.0

    def begin(self) -> None:
        """From now on signs of life are due."""
        self._silent_s = 0.0
        self._looked_s = time.monotonic()

    def look(self) -> bool:
        """False: silent for longer than the limit. Call it after having taken in what has come."""
        now_s = time.monotonic()
        self._silent_s += min(now_s - self._looked_s, 2 * SLICE_S)
        self._looked_s = now_s
        return self._silent_s <= self.limit_s


class Feed:
    """Of one thread. `watch`: its connection looks through it at what comes back. Raises PeerLost at any point if the
    receiver is lost, LinkReplaced if it has another upstream."""

    slice_s = SLICE_S

    def __init__(self, conn: Conn, silence_s: float = SILENCE_S) -> None:
        self.conn = conn
        self.have = 0
        """Chunks of the version under way that the receiver has told to be there."""
        self._silence_s = silence_s
        self._life = Life()
        self._came = bytearray()
        self._replies: list[Answer | Stored] = []
        self._looked_s = 0.0
        self._said_s = 0.0

    def look(self, moved_bytes: int = 0) -> None:
        """Takes in what has come back; raises if the receiver is silent. What the socket took proves nothing."""
        now_s = time.monotonic()
        if now_s - self._looked_s < self.slice_s / 2:
            return
        self._looked_s = now_s
        self.take_in()
        if not self._life.look():
            raise PeerLost(f"{self.conn.peer} gave no sign of life for {self._life.silent_s * 1e3:.0f} ms")

    def take_in(self) -> None:
        """Everything that has come back, without waiting. Raises LinkReplaced, PeerLost at EOF."""
        # Not past an answer that nobody has taken yet: the receiver may close right after its last one.
        while not self._replies and (came := self.conn.recv_ready()):
            self._came += came
            self._parse()

    def announce(self, manifest: Manifest) -> Answer:
        """Raises ValueError if the manifest is too long for any relay to accept."""
        message = frame(Announce(manifest=manifest))
        if len(message) - struct.calcsize("<I") > MANIFEST_MESSAGE_BYTES:
            raise ValueError(f"the manifest of version {manifest.version} has {len(message)} bytes: use larger chunks")
        self.have = 0
        self._life.begin()
        self.conn.send(message, self._silence_s, watch=self)
        return self._await(Answer)

    def send_chunk(self, index: int, chunk: memoryview) -> None:
        self.conn.send(CHUNK_HEADER.pack(index, len(chunk)), self._silence_s, more=True, watch=self)
        self.conn.send(chunk, self._silence_s, watch=self)
        self._said_s = time.monotonic()

    def linger(self) -> None:
        """Call at least every SLICE_S while there is nothing to send in the middle of a version."""
        self.look()
        if time.monotonic() - self._said_s >= BEAT_S:
            self._said_s = time.monotonic()
            self.conn.say(CHUNK_HEADER.pack(FRAME_PING, 0))

    def abort(self) -> None:
        """The rest of this version does not come over this link."""
        self.conn.send(CHUNK_HEADER.pack(FRAME_ABORT, 0), self._silence_s)

    def stored(self) -> Stored:
        """After the last chunk."""
        return self._await(Stored)

    def goodbye(self) -> None:
        self.conn.send(frame(Announce(manifest=None)), self._silence_s)

    def _await(self, type_: type[R]) -> R:
        """Beats alone do not count for ever: without progress the receiver is stuck."""
        have, since_s = self.have, time.monotonic()
        poll = select.poll()
        poll.register(self.conn, select.POLLIN)
        while not self._replies:
            if self.have != have:
                have, since_s = self.have, time.monotonic()
            elif time.monotonic() - since_s > self._silence_s:
                raise PeerLost(f"{self.conn.peer} makes no progress for {self._silence_s:g} s")
            poll.poll(self.slice_s * 1e3)
            self.take_in()
            if not self._replies:
                self.look()
        reply = self._replies.pop(0)
        if not isinstance(reply, type_):
            raise BadPeer(Refusal.MALFORMED, f"{self.conn.peer} says {reply} instead of its {type_.__name__}")
        return reply

    def _parse(self) -> None:
        head = struct.calcsize("<I")
        while len(self._came) >= head:
            (size,) = struct.unpack_from("<I", self._came)
            if size > SMALL_MESSAGE_BYTES:
                raise BadPeer(Refusal.TOO_LARGE, f"{self.conn.peer} announces a reply of {size} bytes")
            if len(self._came) < head + size:
                return
            body = bytes(self._came[head : head + size])
            del self._came[: head + size]
            self._life.heard()
            self._take(body)

    def _take(self, body: bytes) -> None:
        try:
            reply = _replies.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadPeer(Refusal.MALFORMED, f"{self.conn.peer} sent no reply: {error}") from error
        match reply:
            case Beat(have=have):
                self.have = have
            case Replaced():
                raise LinkReplaced(f"{self.conn.peer} has another upstream")
            case Answer() | Stored():
                self._replies.append(reply)
