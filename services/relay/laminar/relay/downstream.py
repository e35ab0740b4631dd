"""Sending side: keeps one link to the next member of the chain and forwards versions to it."""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable

from laminar.core.identity import Epoch
from laminar.relay.counters import Counters
from laminar.relay.membership import Membership
from laminar.relay.serving import Credentials
from laminar.relay.store import Pin, VersionLost, VersionStore
from laminar.shell.handover import PURPOSE, announce, send_chunk
from laminar.shell.logs import fields
from laminar.shell.transport import (
    SILENCE_S,
    Conn,
    PeerLost,
    Waker,
    connect,
    prove_as_client,
    recv_message,
    send_message,
)
from laminar.wire.links import (
    CHUNK_HEADER,
    FRAME_ABORT,
    FRAME_PING,
    SMALL_MESSAGE_BYTES,
    Announce,
    Answer,
    Hello,
    LinkKind,
    LinkVerdict,
    OfferVerdict,
    Stored,
    Welcome,
)
from laminar.wire.messages import ChainMember

log = logging.getLogger("laminar.relay")

CONNECT_S = 2.0
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0
PING_S = 1.0
"""Well below the receiver's SILENCE_S, so that waiting for our own upstream is not taken for death."""


class DownstreamLink:
    """One thread. Life: connect -> prove -> hello -> (wait for a version -> forward it)* ; again after each loss.

    Ends by `stop` (with a goodbye, so that the neighbour does not report us lost) or by `cut`.
    """

    def __init__(
        self,
        target: ChainMember,
        credentials: Credentials,
        membership: Membership,
        store: VersionStore,
        counters: Counters,
        on_change: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.target = target
        self._credentials = credentials
        self._membership = membership
        self._store = store
        self._counters = counters
        self._on_change = on_change
        self._fail = fail
        self._waker = Waker()
        self._stopping = False
        self._is_cut = False
        self._conn: Conn | None = None
        self._lock = threading.Lock()
        self._pause_s = FIRST_PAUSE_S
        self._thread = threading.Thread(target=self._run, name=f"link-{target.slot}")

    def start(self) -> None:
        self._store.subscribe(self._waker)
        self._thread.start()

    def kick(self) -> None:
        """Tries again now if the link is down: a new epoch says that the neighbour is there."""
        self._waker.set()

    def stop(self) -> None:
        """Asks the thread to end with a goodbye: by the new list this neighbour is not ours. `join` waits for it."""
        self._stopping = True
        self._waker.set()

    def cut(self) -> None:
        """Breaks the connection, so that `join` waits for no transfer and the neighbour knows that we are gone."""
        self._is_cut = True
        self.stop()
        with self._lock:
            if self._conn is not None:
                self._conn.interrupt()

    def join(self) -> None:
        """Waits for the thread; the last call."""
        self._thread.join()
        self._waker.close()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._session()
                except PeerLost as error:
                    self._lost(error)
                if not self._stopping:
                    self._wait(None, self._pause_s)
                    self._pause_s = min(LAST_PAUSE_S, 2 * self._pause_s)
        except BaseException as error:  # noqa: BLE001 - nothing is swallowed: it ends the process
            self._fail(error)
        finally:
            self._store.unsubscribe(self._waker)

    def _lost(self, error: PeerLost) -> None:
        if not self._stopping and self._membership.downstream_lost(self.target.slot):
            log.warning("downstream lost", extra=fields(downstream=self.target.slot, why=str(error)))
            self._on_change()

    def _session(self) -> None:
        conn = connect(self.target.address, CONNECT_S)
        with self._lock:
            self._conn = conn
        try:
            prove_as_client(conn, self._credentials.token, self._credentials.job_uid, PURPOSE)
            place = self._membership.place
            send_message(conn, Hello(kind=LinkKind.CHAIN, slot=place.slot, epoch=place.epoch))
            welcome = recv_message(conn, Welcome, SMALL_MESSAGE_BYTES)
            if welcome.verdict is not LinkVerdict.ACCEPTED:
                self._declined(welcome, place.epoch)
                return
            self._pause_s = FIRST_PAUSE_S
            self._membership.downstream_linked(self.target.slot)
            log.info("downstream linked", extra=fields(downstream=self.target.slot, epoch=place.epoch))
            self._on_change()
            self._feed(conn, max((held.version for held in welcome.held), default=-1))
        finally:
            with self._lock:
                self._conn = None
                conn.close()

    def _declined(self, welcome: Welcome, epoch: Epoch) -> None:
        what = fields(downstream=self.target.slot, verdict=welcome.verdict, epoch=epoch, current=welcome.current)
        log.info("downstream declines this link", extra=what)

    def _feed(self, conn: Conn, cursor: int) -> None:
        """Forwards until `stop`. `cursor`: the newest version that the neighbour holds."""
        while not self._stopping:
            self._waker.clear()
            pin = self._store.pin_for_downstream(cursor)
            if pin is None:
                if not self._stopping and self._wait(conn, None):
                    raise PeerLost(f"{conn.peer} closed the connection")
                continue
            try:
                if self._forward(conn, pin):
                    cursor = pin.manifest.version
            finally:
                pin.release()
        if not self._is_cut:
            send_message(conn, Announce(manifest=None))

    def _forward(self, conn: Conn, pin: Pin) -> bool:
        """True: the neighbour needs this version no more, whatever it did with it."""
        announce(conn, pin.manifest, SILENCE_S)
        answer = recv_message(conn, Answer, SMALL_MESSAGE_BYTES)
        if answer.verdict is not OfferVerdict.SEND:
            what = fields(version=pin.manifest.version, verdict=answer.verdict, why=answer.detail)
            log.info("downstream does not take a version", extra=what)
            return True
        try:
            for index in range(pin.manifest.num_chunks):
                self._must_go_on()
                while not pin.wait_chunk(index, PING_S):
                    self._must_go_on()
                    conn.send(CHUNK_HEADER.pack(FRAME_PING, 0), SILENCE_S)
                with pin.chunk(index) as chunk:
                    send_chunk(conn, index, chunk, SILENCE_S)
                    self._counters.forwarded(len(chunk))
        except VersionLost:
            conn.send(CHUNK_HEADER.pack(FRAME_ABORT, 0), SILENCE_S)
            return False
        stored = recv_message(conn, Stored, SMALL_MESSAGE_BYTES)
        return stored.version == pin.manifest.version

    def _must_go_on(self) -> None:
        if self._stopping:
            raise VersionLost("this link has ended")

    def _wait(self, conn: Conn | None, timeout_s: float | None) -> bool:
        """Until the waker is set, or `timeout_s`, or `conn` has something to say: then True."""
        poll = select.poll()
        poll.register(self._waker, select.POLLIN)
        if conn is not None:
            poll.register(conn, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}
        if conn is None:
            self._waker.clear()
        return conn is not None and conn.fileno() in ready
