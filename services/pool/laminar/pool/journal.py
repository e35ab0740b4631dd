"""How what the pool decides becomes durable, and what people are told of it.

    decide (no await)  ->  await journal.commit()  ->  answer

Rows are written in the order of the decisions, because `submit` collects them in the very turn of the loop in which
they were decided. Commands to replicas leave only after the rows that they speak of are durable.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

from laminar.pool import rows
from laminar.pool.rows import Op
from laminar.pool.signals import Clock
from laminar.pool.store import Store
from laminar.shell.answers import Refusal
from laminar.shell.logs import fields
from laminar.wire.dataplane import Command
from laminar.wire.messages import Event

log = logging.getLogger(__name__)

COMMIT_LIMIT_S = 5.0
"""A caller that waits longer for the disk is told to call again; its rows stay in the store's queue."""
STORE_BUSY = ("StoreBusy", "the ledger's disk is slow; call again")
EVENTS_IN_MEMORY = 2000
EVENTS_STORED = 5000


class Journal:
    """`collect`: what the state machines have to write now; `deliver`: puts a command on its replica's connection."""

    def __init__(
        self, store: Store, clock: Clock, events: Iterable[Event], collect: Callable[[], list[Op]],
        deliver: Callable[[str, Command], None],
    ) -> None:  # fmt: skip
        self.store = store
        self.events = deque(events, maxlen=EVENTS_IN_MEMORY)
        self.last_seq = self.events[-1].seq if self.events else 0
        self.on_failure: Callable[[BaseException], None] = _raise
        self._clock, self._collect, self._deliver = clock, collect, deliver
        self._ops: list[Op] = []
        self._commands: list[tuple[str, Command]] = []
        self._last: asyncio.Future[None] | None = None

    def admit(self) -> None:
        """Raises a 503 while nothing can be written, so that what waits for the disk stays bounded."""
        if self.store.condition is not None:
            raise Refusal(503, *self.store.condition)

    def event(self, kind: str, text: str) -> None:
        """Something people want to know."""
        self.last_seq += 1
        event = Event(seq=self.last_seq, wall_s=self._clock.wall_s(), kind=kind, text=text)
        self.events.append(event)
        self._ops.append(rows.event(event))
        if self.last_seq % 500 == 0:
            self._ops.append(rows.DeleteBelow("events", self.last_seq - EVENTS_STORED))
        log.info(text, extra=fields(event=kind))

    def write(self, *ops: Op) -> None:
        """Rows that no state machine names; they go with the next commit."""
        self._ops.extend(ops)

    def command(self, slot: str, command: Command) -> None:
        """Leaves once the next commit is durable."""
        self._commands.append((slot, command))

    def submit(self) -> asyncio.Future[None] | None:
        """Everything decided so far goes to the store, in order. Done when durable; None: it is so already."""
        decided = self._collect()
        ops, commands = [*decided, *self._ops], self._commands
        self._ops, self._commands = [], []
        if ops or commands:
            self._last = self.store.submit(ops)
            self._last.add_done_callback(lambda future: self._written(future, commands))
        return self._last if self._last and not self._last.done() else None

    async def commit(self) -> None:
        """Returns when everything decided so far is durable. Raises a 503 Refusal after COMMIT_LIMIT_S."""
        written = self.submit()
        if written is None:
            return
        await asyncio.wait((written,), timeout=COMMIT_LIMIT_S)
        if not written.done():
            raise Refusal(503, *(self.store.condition or STORE_BUSY))
        written.result()

    def _written(self, future: asyncio.Future[None], commands: Iterable[tuple[str, Command]]) -> None:
        error = future.exception()
        if error is not None:
            self.on_failure(error)
            return
        for slot, command in commands:
            self._deliver(slot, command)


def _raise(error: BaseException) -> None:
    raise error
