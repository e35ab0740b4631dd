"""Hand-off to engines: passes a slot's descriptor (memfd), or its bytes (TCP), and holds the slot meanwhile."""

from __future__ import annotations

import logging
import select
import socket

from laminar.relay.counters import Counters
from laminar.relay.serving import Credentials
from laminar.relay.store import VersionStore
from laminar.relay.uses import Pin
from laminar.shell.handoff import MAX_WAIT_S, PURPOSE
from laminar.shell.logs import fields
from laminar.shell.transport import (
    SILENCE_S,
    BadPeer,
    Conn,
    PeerLost,
    Refusal,
    SocketConn,
    prove_as_listener,
    recv_message,
    send_message,
)
from laminar.wire.links import CHUNK_HEADER, FRAME_ABORT, SMALL_MESSAGE_BYTES, Opened, OpenVersion

log = logging.getLogger("laminar.relay")


class ReaderServer:
    """One connection a reader, each in its own thread; a slot is held until the reader closes it, dies, or has had it
    for `read_deadline_s` and a new version needs it."""

    def __init__(
        self, credentials: Credentials, store: VersionStore, counters: Counters, read_deadline_s: float
    ) -> None:
        self._credentials = credentials
        self._store = store
        self._counters = counters
        self._read_deadline_s = read_deadline_s

    def serve(self, conn: Conn) -> None:
        """A reader of this machine, over the unix socket. Raises PeerLost when it dies before it has its version,
        BadPeer when it breaks the rules."""
        assert isinstance(conn, SocketConn), "descriptors pass over unix sockets only"
        prove_as_listener(conn, self._credentials.token, self._credentials.job_uid, PURPOSE)
        pin = self._open(conn)
        if pin is None:
            return
        try:
            send_message(conn, Opened(manifest=pin.manifest, generation=pin.generation, newest=self._store.newest()))
            try:
                socket.send_fds(conn.socket, [b"\0"], [pin.slot.memory.fileno()])
            except OSError as error:
                raise PeerLost(f"a reader left: {error}") from error
            self._wait_for_end(conn, pin)
        finally:
            pin.release()

    def pull(self, conn: Conn) -> None:
        """A reader that takes a copy over TCP, after its hello; raises as `serve`."""
        pin = self._open(conn)
        if pin is None:
            return
        try:
            send_message(conn, Opened(manifest=pin.manifest, generation=pin.generation, newest=self._store.newest()))
            for index in range(pin.manifest.num_chunks):
                if not pin.stands():
                    # The hash of a chunk that was overwritten while it went would tell as well.
                    conn.send(CHUNK_HEADER.pack(FRAME_ABORT, 0), SILENCE_S)
                    return
                with pin.chunk(index) as chunk:
                    conn.send(CHUNK_HEADER.pack(index, len(chunk)), SILENCE_S, more=True)
                    conn.send(chunk, SILENCE_S)
                    self._counters.pulled(len(chunk))
            self._wait_for_end(conn, pin)
        finally:
            pin.release()

    def _open(self, conn: Conn) -> Pin | None:
        wish = recv_message(conn, OpenVersion, SMALL_MESSAGE_BYTES)
        if not 0 <= wish.wait_s <= MAX_WAIT_S:
            raise BadPeer(Refusal.MALFORMED, f"a reader wants to wait {wish.wait_s} s")
        pin = self._store.pin_for_reader(wish.version, wish.wait_s, conn.interrupt)
        if pin is None:
            send_message(conn, Opened(newest=self._store.newest()))
        return pin

    def _wait_for_end(self, conn: Conn, pin: Pin) -> None:
        poll = select.poll()
        poll.register(conn, select.POLLIN)
        if not poll.poll(self._read_deadline_s * 1e3):
            self._counters.reader_overdue()
            log.warning("a reader is overdue", extra=fields(version=pin.manifest.version, peer=conn.peer))
            poll.poll()
        try:
            conn.recv_ready()
        except PeerLost:
            return  # the ordinary end of a hold: the reader closed, the slot was taken, or this relay stops
        raise BadPeer(Refusal.MALFORMED, "a reader says more than its wish")
