"""Trainer side of a publication: gives one version's bytes to the master relay.

Blocking, for a publisher thread. It returns when every byte lies verified in the master's memory; the chain behind
the master is not waited for.
"""

from __future__ import annotations

from enum import StrEnum

from laminar.shell.feeding import Feed
from laminar.shell.transport import (
    PROOF_S,
    SILENCE_S,
    BadPeer,
    Conn,
    Dial,
    Refusal,
    connect,
    prove_as_client,
    recv_message,
    send_message,
)
from laminar.wire.links import SMALL_MESSAGE_BYTES, Announce, Hello, LinkKind, OfferVerdict, Welcome
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
    dial: Dial = connect,
) -> HandedOver:
    """Sends the buffer that `manifest` describes to the master at `address`, but for the chunks that it has already.

    May be repeated with the same bytes. `deadline_s` bounds each silence (connecting, no byte moving, no answer), not
    the whole transfer; a master that does not even beat is given up far earlier. Raises PeerLost if the master is
    lost on the way, HandOverRefused if it declines.
    """
    buffer = memoryview(chunks).cast("B")
    if len(buffer) != manifest.total_bytes:
        raise ValueError(f"version {manifest.version} has {manifest.total_bytes} bytes, the buffer {len(buffer)}")
    conn = dial(address, deadline_s)
    try:
        _greet(conn, token, job_uid, attempt, manifest.total_bytes, deadline_s)
        feed = Feed(conn, deadline_s)
        answer = feed.announce(manifest)
        match answer.verdict:
            case OfferVerdict.SEND:
                pass
            case OfferVerdict.HELD:
                return HandedOver.HELD
            case OfferVerdict.SUPERSEDED:
                return HandedOver.SUPERSEDED
            case _:
                raise HandOverRefused(answer.verdict, answer.current, answer.detail)
        for index in range(answer.have, manifest.num_chunks):
            start, end = manifest.chunk_range(index)
            feed.send_chunk(index, buffer[start:end])
        stored = feed.stored()
        if (stored.version, stored.digest) != (manifest.version, manifest.digest):
            raise BadPeer(Refusal.MALFORMED, f"{address} stored {stored}, not version {manifest.version}")
        return HandedOver.SENT
    finally:
        conn.close()


def best_chunk_bytes(
    address: str, token: str, job_uid: str, attempt: int, weights_bytes: int, deadline_s: float = SILENCE_S,
    dial: Dial = connect,
) -> int:  # fmt: skip
    """The chunk size that suits the chain's links, as the master at `address` knows them; 0: it has not measured them.

    Asked before a version is cut into chunks; it is never cut anew. Raises PeerLost.
    """
    conn = dial(address, deadline_s)
    try:
        welcome = _greet(conn, token, job_uid, attempt, weights_bytes, deadline_s)
        send_message(conn, Announce(manifest=None), deadline_s)
        return welcome.chunk_bytes
    finally:
        conn.close()


def _greet(conn: Conn, token: str, job_uid: str, attempt: int, weights_bytes: int, deadline_s: float) -> Welcome:
    prove_as_client(conn, token, job_uid, PURPOSE, min(PROOF_S, deadline_s))
    hello = Hello(kind=LinkKind.HANDOVER, slot="trainer", attempt=attempt, weights_bytes=weights_bytes)
    send_message(conn, hello, deadline_s)
    return recv_message(conn, Welcome, SMALL_MESSAGE_BYTES, deadline_s)
