"""Hand-off to the engines of this machine: passes a slot's descriptor and holds the slot while the engine reads."""

from __future__ import annotations

import socket

from laminar.relay.serving import Credentials
from laminar.relay.store import Pin, VersionStore
from laminar.shell.handoff import MAX_WAIT_S, PURPOSE
from laminar.shell.transport import (
    BadPeer,
    Conn,
    PeerLost,
    Refusal,
    SocketConn,
    prove_as_listener,
    recv_message,
    send_message,
)
from laminar.wire.links import SMALL_MESSAGE_BYTES, Opened, OpenVersion


class ReaderServer:
    """`serve` runs one reader's connection, in its own thread; the slot is held until the reader closes it or dies."""

    def __init__(self, credentials: Credentials, store: VersionStore) -> None:
        self._credentials = credentials
        self._store = store

    def serve(self, conn: Conn) -> None:
        """Raises PeerLost when a reader dies before it has its version, BadPeer when it breaks the rules."""
        assert isinstance(conn, SocketConn), "descriptors pass over unix sockets only"
        prove_as_listener(conn, self._credentials.token, self._credentials.job_uid, PURPOSE)
        wish = recv_message(conn, OpenVersion, SMALL_MESSAGE_BYTES)
        if not 0 <= wish.wait_s <= MAX_WAIT_S:
            raise BadPeer(Refusal.MALFORMED, f"a reader wants to wait {wish.wait_s} s")
        pin = self._store.pin_for_reader(wish.version, wish.wait_s)
        if pin is None:
            send_message(conn, Opened(newest=self._store.newest()))
            return
        try:
            self._pass(conn, pin)
            _wait_for_end(conn)
        finally:
            pin.release()

    def _pass(self, conn: SocketConn, pin: Pin) -> None:
        send_message(conn, Opened(manifest=pin.manifest, generation=pin.generation, newest=self._store.newest()))
        try:
            socket.send_fds(conn.socket, [b"\0"], [pin.slot.memory.fileno()])
        except OSError as error:
            raise PeerLost(f"a reader left: {error}") from error


def _wait_for_end(conn: Conn) -> None:
    try:
        conn.recv_into(memoryview(bytearray(1)), None)
    except PeerLost:
        return  # the ordinary end of a hold: the reader closed, or this relay stops
    raise BadPeer(Refusal.MALFORMED, "a reader says more than its wish")
