"""While the publisher talks to a master relay: is that still the master?

A relay that was killed or stopped may take long to be found out from its connection alone. A stopped one acknowledges
what is sent until its buffers are full; the address of a killed one may still take connections, because whoever
started it keeps the listening socket for its next life (the local driver does), and then nobody answers. The chain
knows sooner: the pool hears of each new epoch, and names its master.

    publisher thread   with watch(version, route) as line: hand_over(..., dial=line.dial)   -> PeerLost when it is cut
    lookout thread     (a moment later) publication(version, epoch)? -> another master -> line.cut()
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from laminar.shell.calls import Refused, Unreachable
from laminar.shell.logs import fields
from laminar.shell.transport import Conn, Dial, PeerLost, connect
from laminar.trainer.background import Background
from laminar.trainer.books import Books

log = logging.getLogger(__name__)

FIRST_ASK_S = 0.1
"""Most hand-overs of small models are done by then, and the pool is not asked at all."""
ASK_WAIT_S = 0.5
"""Of one long poll; a new epoch is answered at once."""
VISIBLE_ASK_S = 0.25
"""Between two questions about a version that is offered to a further master."""
CONNECT_S = 1.0
"""A connection that is not made by then is given up, to ask the pool again: connecting cannot be cut."""
END_S = 10.0


@dataclass(frozen=True, slots=True)
class Route:
    epoch: int
    master: str
    """host:port; empty: there is no master yet."""


class Line:
    """The connection of one call. `dial` belongs to the caller's thread, `cut` to any other; a line stays cut."""

    def __init__(self, dial: Dial = connect) -> None:
        self._dial = dial
        self._lock = threading.Lock()
        self._conn: Conn | None = None
        self._is_cut = False

    def dial(self, address: str, deadline_s: float, /) -> Conn:
        """Raises PeerLost, also when the line was cut meanwhile."""
        conn = self._dial(address, min(deadline_s, CONNECT_S))
        with self._lock:
            if not self._is_cut:
                self._conn = conn
                return conn
        conn.close()
        raise PeerLost(f"{address} is master no longer")

    def cut(self) -> None:
        """What waits on the connection, now or later, ends with PeerLost."""
        with self._lock:
            self._is_cut = True
            if self._conn is not None:
                self._conn.interrupt()

    def hang_up(self) -> None:
        """The call has ended and closed its connection."""
        with self._lock:
            self._is_cut, self._conn = True, None


@dataclass(frozen=True, slots=True)
class _Watched:
    version: int
    route: Route
    line: Line


class Lookout:
    """Owner: the publisher's thread. At most one call is watched at a time; `close` at the end."""

    def __init__(self, make_books: Callable[[], Books]) -> None:
        self._make_books = make_books
        self._changed = threading.Condition(threading.RLock())
        self._watched: _Watched | None = None
        self._closing = False
        self._thread = Background("lookout", self._run)

    @contextmanager
    def watch(self, version: int, route: Route) -> Generator[Line]:
        """Cuts the line as soon as the pool names another master than `route` does."""
        watched = _Watched(version, route, Line())
        self._set(watched)
        try:
            yield watched.line
        finally:
            self._set(None)
            watched.line.hang_up()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(END_S)

    def _set(self, watched: _Watched | None) -> None:
        with self._changed:
            self._watched = watched
            self._changed.notify_all()

    def _run(self) -> None:
        watched = None
        with self._make_books() as books:
            while (watched := self._next(watched)) is not None:
                self._ask(books, watched)

    def _next(self, last: _Watched | None) -> _Watched | None:
        """A call that has lasted for a moment and is not the last one again; None: the end."""
        with self._changed:
            while not self._closing:
                watched = self._watched
                if watched is None or watched is last:
                    self._changed.wait()
                elif not self._ends_within(watched, FIRST_ASK_S):
                    return watched
        return None

    def _ends_within(self, watched: _Watched, wait_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._closing or self._watched is not watched, wait_s)

    def _ask(self, books: Books, watched: _Watched) -> None:
        """Until the call has ended or its line is cut."""
        epoch, wait_s = watched.route.epoch, 0.0
        while not self._ends_within(watched, wait_s):
            try:
                view = books.publication(watched.version, epoch, ASK_WAIT_S)
            except (Refused, Unreachable):
                watched.line.cut()  # the publisher makes the same call next, and reports what it hears
                return
            if view.master != watched.route.master:
                what = fields(version=watched.version, master=watched.route.master, new=view.master, epoch=view.epoch)
                log.info("the master has changed during a call to it", extra=what)
                watched.line.cut()
                return
            # Of a version that is visible already the answer comes at once, whatever the chain does.
            epoch, wait_s = view.epoch, VISIBLE_ASK_S if view.visible else 0.0
