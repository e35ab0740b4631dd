"""Threads that serve connections: one that accepts, one a connection; all owned, all joined."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from laminar.relay.counters import Counters
from laminar.shell.logs import fields
from laminar.shell.transport import BadPeer, Conn, Listener, PeerLost, Refusal, Waker

log = logging.getLogger("laminar.relay")


@dataclass(frozen=True, slots=True)
class Credentials:
    """What proves that a connection belongs to this job."""

    token: str
    job_uid: str


class ConnectionServer:
    """Accepts on one listener and runs `serve(conn)` in a thread for each connection, at most `max_conns` together.

    `serve` ends with PeerLost or by returning; BadPeer is counted and logged. Any other exception is a defect of ours:
    it goes to `fail`, which ends the process.
    """

    def __init__(
        self,
        name: str,
        listener: Listener,
        serve: Callable[[Conn], None],
        max_conns: int,
        counters: Counters,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._name = name
        self._listener = listener
        self._serve = serve
        self._max_conns = max_conns
        self._counters = counters
        self._fail = fail
        self._stop = Waker()
        self._lock = threading.Lock()
        self._conns: dict[Conn, threading.Thread] = {}
        self._acceptor = threading.Thread(target=self._accept, name=f"{name}-accept")

    def start(self) -> None:
        self._acceptor.start()

    def close(self) -> None:
        """Stops accepting, ends every connection, joins every thread."""
        self._stop.set()
        self._acceptor.join()
        with self._lock:
            threads = list(self._conns.values())
            for conn in self._conns:
                conn.interrupt()
        for thread in threads:
            thread.join()
        self._listener.close()
        self._stop.close()

    def _accept(self) -> None:
        try:
            while (conn := self._listener.accept(self._stop)) is not None:
                with self._lock:
                    admitted = len(self._conns) < self._max_conns
                    if admitted:
                        thread = threading.Thread(target=self._run, args=(conn,), name=f"{self._name}-{conn.peer}")
                        self._conns[conn] = thread
                        thread.start()
                if not admitted:
                    self._counters.refused(Refusal.TOO_MANY)
                    conn.close()
        except BaseException as error:  # noqa: BLE001 - nothing is swallowed: it ends the process
            self._fail(error)

    def _run(self, conn: Conn) -> None:
        try:
            self._serve(conn)
        except BadPeer as error:
            self._counters.refused(error.refusal)
            log.warning("connection refused", extra=fields(server=self._name, why=str(error)))
        except PeerLost as error:
            log.info("connection ended", extra=fields(server=self._name, why=str(error)))
        except BaseException as error:  # noqa: BLE001 - nothing is swallowed: it ends the process
            self._fail(error)
        finally:
            with self._lock:
                # Closed under the lock, so that nobody interrupts a descriptor number that has a new owner.
                conn.close()
                del self._conns[conn]
