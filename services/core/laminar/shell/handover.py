"""Trainer side of a publication: gives one version's bytes to the master relay.

Blocking, for a publisher thread. It returns when every byte lies verified in the master's memory; the chain behind
the master is not waited for.
"""

from __future__ import annotations

import struct
from enum import StrEnum

from laminar.shell.transport import (
    SILENCE_S,
    BadPeer,
    Conn,
    Refusal,
    connect,
    prove_as_client,
    recv_message,
    send_message,
)
from laminar.wire.codec import frame
from laminar.wire.links import (
    CHUNK_HEADER,
    MANIFEST_MESSAGE_BYTES,
    SMALL_MESSAGE_BYTES,
    Announce,
    Answer,
    Hello,
    LinkKind,
    OfferVerdict,
    Stored,
    Welcome,
)
from laminar.wire.manifest import Manifest

PURPOSE = "data"
"""What a connection to a relay's data listener is for; part of the proof."""


class HandedOver(StrEnum):
    """How the master came to hold the version."""

    SENT = "sent"
    HELD = "held"
    """It had it already: an earlier call, or the chain, brought it."""
    SUPERSEDED = "superseded"
    """It holds a newer version whole: this one is not needed any more."""


class HandOverRefused(Exception):
    """The relay is well and says no. `current`: the attempt, epoch or slot size in force there."""

    def __init__(self, verdict: OfferVerdict, current: int, detail: str) -> None:
        super().__init__(f"{verdict}: {detail}")
        self.verdict = verdict
        self.current = current

    @property
    def is_final(self) -> bool:
        """False: ask the pool who is master now and try again. True: trying again cannot help."""
        return self.verdict is not OfferVerdict.NOT_MASTER


def hand_over(
    address: str,
    token: str,
    job_uid: str,
    attempt: int,
    manifest: Manifest,
    chunks: bytes | bytearray | memoryview,
    deadline_s: float = SILENCE_S,
) -> HandedOver:
    """Sends the whole buffer that `manifest` describes to the master at `address`. May be repeated with the same bytes.

    `deadline_s` bounds each silence (connecting, no byte moving, no answer), not the whole transfer. Raises PeerLost
    if the master is lost on the way, HandOverRefused if it declines.
    """
    buffer = memoryview(chunks).cast("B")
    if len(buffer) != manifest.total_bytes:
        raise ValueError(f"version {manifest.version} has {manifest.total_bytes} bytes, the buffer {len(buffer)}")
    conn = connect(address, deadline_s)
    try:
        prove_as_client(conn, token, job_uid, PURPOSE)
        send_message(conn, Hello(kind=LinkKind.HANDOVER, slot="trainer", attempt=attempt), deadline_s)
        recv_message(conn, Welcome, SMALL_MESSAGE_BYTES, deadline_s)
        announce(conn, manifest, deadline_s)
        answer = recv_message(conn, Answer, SMALL_MESSAGE_BYTES, deadline_s)
        match answer.verdict:
            case OfferVerdict.SEND:
                pass
            case OfferVerdict.HELD:
                return HandedOver.HELD
            case OfferVerdict.SUPERSEDED:
                return HandedOver.SUPERSEDED
            case _:
                raise HandOverRefused(answer.verdict, answer.current, answer.detail)
        for index in range(manifest.num_chunks):
            start, end = manifest.chunk_range(index)
            send_chunk(conn, index, buffer[start:end], deadline_s)
        stored = recv_message(conn, Stored, SMALL_MESSAGE_BYTES, deadline_s)
        if (stored.version, stored.digest) != (manifest.version, manifest.digest):
            raise BadPeer(Refusal.MALFORMED, f"{address} stored {stored}, not version {manifest.version}")
        return HandedOver.SENT
    finally:
        conn.close()


def announce(conn: Conn, manifest: Manifest, deadline_s: float) -> None:
    """Sends the manifest. Raises PeerLost; ValueError if it is too long for any relay to accept."""
    message = frame(Announce(manifest=manifest))
    if len(message) - struct.calcsize("<I") > MANIFEST_MESSAGE_BYTES:
        raise ValueError(f"the manifest of version {manifest.version} has {len(message)} bytes: use larger chunks")
    conn.send(message, deadline_s)


def send_chunk(conn: Conn, index: int, chunk: memoryview, deadline_s: float) -> None:
    """One chunk frame. Raises PeerLost."""
    conn.send(CHUNK_HEADER.pack(index, len(chunk)), deadline_s, more=True)
    conn.send(chunk, deadline_s)
