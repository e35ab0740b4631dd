"""The data plane of one relay: owns the slots, the listeners and all data threads.

    trainer ---hand-over---> [master]  --chain--> [relay] --chain--> [tail]
                                 |                   |                  |
                              engines             engines            engines     (memfd over a unix socket)

Who calls what: `UpstreamServer` fills a slot, chunk by chunk; `DownstreamLink` forwards each chunk from that same slot
as soon as it has landed; `ReaderServer` passes complete slots to engines. `VersionStore` is where they meet.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from laminar.core.broadcast import LinkMeter
from laminar.relay.counters import Counters, CountersView
from laminar.relay.downstream import DownstreamLink
from laminar.relay.links import DownstreamLinks
from laminar.relay.membership import LowerEpoch, Membership
from laminar.relay.readers import ReaderServer
from laminar.relay.serving import ConnectionServer, Credentials
from laminar.relay.store import StoreSizes, VersionStore
from laminar.relay.upstream import UpstreamServer
from laminar.shell.logs import fields
from laminar.shell.transport import Dial, Listener, connect
from laminar.wire.links import Held
from laminar.wire.messages import ChainEpoch

log = logging.getLogger("laminar.relay")

MAX_DATA_CONNS = 128
"""One upstream, one trainer, and engines that pull; a few more may be on their way out."""
MAX_READERS = 256
"""Engines of one machine, with restarts."""

__all__ = ["DataPlane", "LowerEpoch", "PlaneView"]


@dataclass(frozen=True, slots=True)
class PlaneView:
    """What the agent tells the pool, metrics and people."""

    epoch: int
    members: tuple[str, ...]
    index: int | None
    """Position in the chain, 0 = master."""
    held: tuple[Held, ...]
    lost_neighbours: tuple[str, ...]
    counters: CountersView
    downstream: str | None
    """The member that this relay sends to; not its neighbour if that is passed by.
    Those passed by are fed beside it, if they live."""
    byte_s: float
    message_s: float
    """The slowest link from here on, as measured; 0: not yet."""


class DataPlane:
    """Life: start -> apply_epoch* -> close. `on_change` is called from data threads and must not block;
    `dial` makes the connections down the chain.

    Owns the listeners; `close` joins every thread and frees the slots. A defect in a data thread is kept in `failure`
    for the owner, which must end the process.
    """

    def __init__(
        self,
        slot: str,
        credentials: Credentials,
        sizes: StoreSizes,
        data_listener: Listener,
        handoff_listener: Listener,
        on_change: Callable[[], None],
        dial: Dial = connect,
    ) -> None:
        self._credentials = credentials
        self._on_change = on_change
        self._dial = dial
        self._counters = Counters()
        self._membership = Membership(slot)
        self._meter = LinkMeter()
        self._store = VersionStore(sizes, self._counters, on_change)
        readers = ReaderServer(credentials, self._store, self._counters, sizes.read_deadline_s)
        upstream = UpstreamServer(
            credentials, self._membership, self._store, self._counters, self._meter, readers.pull, on_change
        )
        self._servers = [
            ConnectionServer("data", data_listener, upstream.serve, MAX_DATA_CONNS, self._counters, self._fail),
            ConnectionServer("handoff", handoff_listener, readers.serve, MAX_READERS, self._counters, self._fail),
        ]
        self._links = DownstreamLinks(self._membership, self._new_link)
        self._lock = threading.Lock()
        self.failure: BaseException | None = None

    def start(self) -> None:
        for server in self._servers:
            server.start()

    def apply_epoch(self, epoch: ChainEpoch) -> None:
        """Takes the place that the list names. Links that did not change stay; a version whose sender changed goes on
        from the new one. Raises LowerEpoch. May be repeated."""
        with self._lock:
            if self._membership.apply(epoch):
                self._store.stop_writer()
            self._links.renew()
        place = self._membership.place
        log.info("epoch", extra=fields(epoch=place.epoch, index=place.index, members=",".join(place.members)))
        self._on_change()

    def retain(self, versions: Sequence[int]) -> None:
        """Versions that somebody still needs, the most needed first."""
        self._store.retain(versions)

    def view(self) -> PlaneView:
        place = self._membership.place
        return PlaneView(
            epoch=place.epoch,
            members=place.members,
            index=place.index,
            held=tuple(self._store.held()),
            lost_neighbours=tuple(self._membership.lost),
            counters=self._counters.view(),
            downstream=None if (aim := self._membership.downstream) is None else aim[0].slot,
            byte_s=self._meter.byte_s,
            message_s=self._meter.message_s,
        )

    def close(self) -> None:
        """Ends all connections, joins all threads, frees the memory."""
        self._store.close()
        self._links.cut()
        for server in self._servers:
            server.close()
        self._links.join()
        self._store.free()

    def _new_link(self, beside: str | None) -> DownstreamLink:
        # A link beside the chain says nothing about the chain's own.
        meter = self._meter if beside is None else LinkMeter()
        return DownstreamLink(
            self._credentials, self._membership, self._store, self._counters, meter, self._dial, self._on_change,
            self._links.follow_walk, self._fail, beside,
        )  # fmt: skip

    def _fail(self, error: BaseException) -> None:
        log.critical("a data thread failed", exc_info=error)
        self.failure = error
        self._on_change()
