"""Sending side: keeps one link down the chain and forwards versions over it, past lost neighbours if need be."""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable

from laminar.core.broadcast import LinkMeter
from laminar.core.chain import Standing
from laminar.relay.counters import Counters
from laminar.relay.membership import Membership
from laminar.relay.serving import Credentials
from laminar.relay.store import VersionStore
from laminar.relay.uses import Pin, VersionLost
from laminar.shell.feeding import SLICE_S, Feed, LinkReplaced
from laminar.shell.handover import PURPOSE
from laminar.shell.logs import fields
from laminar.shell.transport import BadPeer, Conn, Dial, PeerLost, Waker, prove_as_client, recv_message, send_message
from laminar.wire.links import SMALL_MESSAGE_BYTES, Hello, LinkKind, LinkVerdict, OfferVerdict, Welcome
from laminar.wire.messages import ChainMember

log = logging.getLogger("laminar.relay")

CONNECT_S = 1.0
"""For each of connecting, the proof and the welcome. A member that needs longer is passed by."""
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0


class DownstreamLink:
    """One thread. Life: connect -> prove -> hello -> (wait for a version -> forward it)*; again after each loss, then
    with the next member of the list if this relay may pass the lost one by. `on_walk` is called when it has done so.

    With `beside` it goes to that member, which the chain's own link has passed by, and nowhere else.
    Ends by `stop` (with a goodbye, so that the neighbour does not report us lost) or by `cut`.
    """

    def __init__(
        self,
        credentials: Credentials,
        membership: Membership,
        store: VersionStore,
        counters: Counters,
        meter: LinkMeter,
        dial: Dial,
        on_change: Callable[[], None],
        on_walk: Callable[[], None],
        fail: Callable[[BaseException], None],
        beside: str | None = None,
    ) -> None:
        self._credentials = credentials
        self._membership = membership
        self._store = store
        self._counters = counters
        self._meter = meter
        self._dial = dial
        self._on_change = on_change
        self._on_walk = on_walk
        self._fail = fail
        self._beside = beside
        self._waker = Waker()
        self._stopping = False
        self._is_cut = False
        self._conn: Conn | None = None
        self._member: ChainMember | None = None
        self._lock = threading.Lock()
        self._pause_s = FIRST_PAUSE_S
        self._thread = threading.Thread(target=self._run, name="downstream" if beside is None else "beside")

    def start(self) -> None:
        self._store.subscribe(self._waker)
        self._thread.start()

    @property
    def member(self) -> ChainMember | None:
        """Whom this link goes to, or went to last."""
        return self._member

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
            if self._beside is not None:
                self._wait(None, self._pause_s)
            while not self._stopping and (aim := self._aim()) is not None:
                if not self._try(*aim) and not self._stopping:
                    self._wait(None, self._pause_s)
                    self._pause_s = min(LAST_PAUSE_S, 2 * self._pause_s)
        except BaseException as error:  # noqa: BLE001 - nothing is swallowed: it ends the process
            self._fail(error)
        finally:
            self._store.unsubscribe(self._waker)

    def _aim(self) -> tuple[ChainMember, Standing] | None:
        """None: this link has nobody to go to."""
        if self._beside is None:
            return self._membership.downstream
        return next((aim for aim in self._membership.passed_by if aim[0].slot == self._beside), None)

    def _try(self, member: ChainMember, standing: Standing) -> bool:
        """One session. True: there is another target, to be tried at once."""
        self._member = member
        try:
            self._session(member, standing)
        except LinkReplaced as error:
            log.info("downstream has another upstream", extra=fields(downstream=member.slot, why=str(error)))
        except PeerLost as error:
            if isinstance(error, BadPeer):
                self._counters.refused(error.refusal)
            return not self._stopping and self._lost(member, error)
        return False

    def _lost(self, member: ChainMember, error: PeerLost) -> bool:
        news = self._membership.downstream_lost(member.slot)
        passed_by = self._beside is None and self._membership.pass_by(member.slot)
        if passed_by:
            self._counters.bypassed()
        if self._beside is None:
            self._on_walk()
        if news or passed_by:
            what = fields(downstream=member.slot, why=str(error), bypassed=passed_by)
            log.warning("downstream lost", extra=what)
            self._on_change()
        return passed_by

    def _session(self, member: ChainMember, standing: Standing) -> None:
        conn = self._dial(member.address, CONNECT_S)
        with self._lock:
            self._conn = conn
        try:
            if self._is_cut:
                return
            prove_as_client(conn, self._credentials.token, self._credentials.job_uid, PURPOSE, CONNECT_S)
            slot = self._membership.place.slot
            hello = Hello(kind=LinkKind.CHAIN, slot=slot, epoch=standing.epoch, bypass=standing.bypass)
            asked_s = time.monotonic()
            send_message(conn, hello)
            welcome = recv_message(conn, Welcome, SMALL_MESSAGE_BYTES, CONNECT_S)
            what = fields(downstream=member.slot, epoch=standing.epoch, bypass=standing.bypass)
            if welcome.verdict is not LinkVerdict.ACCEPTED:
                log.info(f"downstream declines this link: {welcome.verdict}", extra=what)
                return
            self._meter.message(time.monotonic() - asked_s)
            self._pause_s = FIRST_PAUSE_S
            if self._beside is None:
                # One that is fed beside the chain stays reported: the next list is to give it a place in the chain.
                self._membership.downstream_linked(member.slot)
            log.info("downstream linked" if self._beside is None else "linked beside the chain", extra=what)
            self._on_change()
            self._feed(Feed(conn), max((held.version for held in welcome.held), default=-1))
        finally:
            with self._lock:
                self._conn = None
                conn.close()

    def _feed(self, feed: Feed, cursor: int) -> None:
        """Forwards until `stop`. `cursor`: the newest version that the neighbour holds."""
        try:
            while not self._stopping:
                self._waker.clear()
                pin = self._store.pin_for_downstream(cursor, counts=self._beside is None)
                if pin is None:
                    if not self._stopping:
                        self._wait(feed.conn, None)
                        feed.take_in()
                    continue
                try:
                    if self._forward(feed, pin):
                        cursor = pin.manifest.version
                finally:
                    pin.release()
            if not self._is_cut:
                feed.goodbye()
        except (LinkReplaced, BadPeer):
            raise
        except PeerLost:
            # A send fails as soon as the other side has closed; its last word may lie unread.
            feed.take_in()
            raise

    def _forward(self, feed: Feed, pin: Pin) -> bool:
        """True: the neighbour needs this version no more, whatever it did with it."""
        asked_s = time.monotonic()
        answer = feed.announce(pin.manifest)
        if answer.verdict is not OfferVerdict.SEND:
            what = fields(version=pin.manifest.version, verdict=answer.verdict, why=answer.detail)
            log.info("downstream does not take a version", extra=what)
            return True
        self._meter.message(time.monotonic() - asked_s)
        if answer.have:
            log.info("broadcast goes on", extra=fields(version=pin.manifest.version, have=answer.have))
        began_s, began_bytes = time.monotonic(), pin.manifest.chunk_bytes * answer.have
        try:
            for index in range(answer.have, pin.manifest.num_chunks):
                self._must_go_on()
                while not pin.wait_chunk(index, SLICE_S):
                    self._must_go_on()
                    feed.linger()
                self._send_chunk(feed, pin, index)
        except VersionLost:
            feed.abort()
            return False
        stored = feed.stored()
        took_s = max(1e-9, time.monotonic() - began_s)
        sent_bytes = max(0, pin.manifest.total_bytes - began_bytes)
        if self._beside is None:
            self._counters.hop_done(sent_bytes / took_s)
        self._meter.version(sent_bytes, pin.manifest.num_chunks - answer.have, took_s)
        self._meter.told(stored.byte_s, stored.message_s)
        return stored.version == pin.manifest.version

    def _send_chunk(self, feed: Feed, pin: Pin, index: int) -> None:
        with pin.chunk(index) as chunk:
            feed.send_chunk(index, chunk)
            self._counters.forwarded(len(chunk))

    def _must_go_on(self) -> None:
        if self._stopping:
            raise VersionLost("this link has ended")

    def _wait(self, conn: Conn | None, timeout_s: float | None) -> None:
        """Until the waker is set, or `timeout_s`, or `conn` has something to say."""
        poll = select.poll()
        poll.register(self._waker, select.POLLIN)
        if conn is not None:
            poll.register(conn, select.POLLIN)
        poll.poll(None if timeout_s is None else timeout_s * 1000)
        if conn is None:
            self._waker.clear()
