"""The pool's store: what was acknowledged is on disk.

    submit(ops) --queue--> writer thread: one transaction for all that waits, fsync --> every future in it is done

Invariant: ops are written in the order of the `submit` calls, those of one call wholly or not at all, and a future
is done only when its ops and all before them are durable. A full or failing disk holds the queue; nothing in it is
dropped.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, assert_never

from laminar.pool.rows import Delete, DeleteAbove, DeleteBelow, HalveLoads, Op, PruneStep, Put, Value, meta
from laminar.shell.ledger_file import FILE_NAME, SCHEMA_VERSION, TABLES, columns, read_meta, schema

T = TypeVar("T")

WINDOW_S = 0.005
"""How long the first commit waits for company: half of the 10 ms that a ledger move may cost."""
RETRY_S = 0.5
"""A full disk is tried again this often: freed space shows within a second, and the wait costs nothing."""
_WAITS = {
    sqlite3.SQLITE_FULL: "DiskFull",
    sqlite3.SQLITE_IOERR: "DiskFailing",
    sqlite3.SQLITE_CANTOPEN: "DiskFailing",
    sqlite3.SQLITE_BUSY: "StoreBusy",
    sqlite3.SQLITE_LOCKED: "StoreBusy",
}
"""Errors that may pass, by SQLite's primary code, and the condition that people see meanwhile."""


class StoreError(ValueError):
    """The store cannot be used: of another job, or of a newer program; the text is for people."""


class StoreUnavailable(StoreError):
    """The store cannot be opened now: in use, or the disk is full or failing. Later it may be."""


class Store(Protocol):
    """Where the pool's truth survives its process."""

    @property
    def condition(self) -> tuple[str, str] | None:
        """(reason, sentence) while nothing can be written; None when all is well."""
        ...

    def submit(self, ops: Sequence[Op]) -> asyncio.Future[None]:
        """Done once these and all earlier ops are durable, however long that takes; must not be cancelled."""
        ...

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """The result of a query that sees everything committed before it."""
        ...

    def close(self) -> None:
        """Writes what waits and closes; returns when the files are closed."""
        ...


@dataclass(slots=True)
class _Entry:
    ops: Sequence[Op]
    query: Callable[[sqlite3.Connection], Any] | None
    done: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    result: Any = None


@dataclass(frozen=True, slots=True)
class _Owner:
    """What the file says whose it is."""

    job_uid: str
    generation: int
    digests: dict[str, str] = field(default_factory=dict[str, str])


class SqliteStore:
    """See `Store`. One file, one writing process (a lock file beside it), one writer thread; others read (WAL)."""

    def __init__(self, folder: Path, job_uid: str, generation: int) -> None:
        """Opens or makes `folder`/ledger.sqlite. Raises StoreError, StoreUnavailable."""
        self._condition: tuple[str, str] | None = None
        self._queue: deque[_Entry] = deque()
        self._wake = threading.Condition()
        self._closing = threading.Event()
        self.on_commit: Callable[[float], None] = lambda _: None
        """Told the seconds of each transaction, on the writer thread."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _take_lock(folder)
        except OSError as error:
            raise StoreUnavailable(f"the ledger in {folder} cannot be opened: {error}") from error
        try:
            self.connection = _open(folder / FILE_NAME, _Owner(job_uid, generation))
        except StoreError:
            os.close(self._lock)
            raise
        except (OSError, sqlite3.DatabaseError) as error:
            os.close(self._lock)
            raise StoreUnavailable(f"the ledger in {folder} cannot be opened: {error}") from error
        self._thread = threading.Thread(target=self._write_all, name="store", daemon=True)
        self._thread.start()

    @property
    def condition(self) -> tuple[str, str] | None:
        return self._condition

    def submit(self, ops: Sequence[Op]) -> asyncio.Future[None]:
        return self._enqueue(ops, None)

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        result: T = await asyncio.shield(self._enqueue((), query))
        return result

    def close(self) -> None:
        self._closing.set()
        with self._wake:
            self._wake.notify()
        self._thread.join()
        self.connection.close()
        os.close(self._lock)

    def _enqueue(self, ops: Sequence[Op], query: Callable[[sqlite3.Connection], Any] | None) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        entry = _Entry(ops, query, loop.create_future(), loop)
        with self._wake:
            assert not self._closing.is_set(), "submit after close"
            self._queue.append(entry)
            self._wake.notify()
        return entry.done

    # --- the writer thread --------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing.is_set():
                    self._wake.wait()
                if not self._queue:
                    return
            self._closing.wait(WINDOW_S)
            with self._wake:
                entries = list(self._queue)
            outcome = self._until_written(entries)
            with self._wake:
                for _ in entries:
                    self._queue.popleft()
            for entry in entries:
                entry.loop.call_soon_threadsafe(_resolve, entry, outcome)
            if outcome is not None:
                return

    def _until_written(self, entries: list[_Entry]) -> Exception | None:
        """Tries again while the error may pass; the error that will not, else None."""
        while True:
            started_s = time.monotonic()
            try:
                self._transaction(entries)
            except sqlite3.Error as error:
                if self.connection.in_transaction:
                    self.connection.rollback()
                reason = _WAITS.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
                if reason is None:
                    return error
                self._condition = (reason, f"the ledger cannot be written ({error}); all callers wait")
                if self._closing.wait(RETRY_S):
                    return error
            except Exception as error:  # noqa: BLE001 - carried to the loop, where it ends the process
                return error
            else:
                self._condition = None
                self.on_commit(time.monotonic() - started_s)
                return None

    def _transaction(self, entries: list[_Entry]) -> None:
        ops = [op for entry in entries for op in entry.ops]
        if ops:
            self.connection.execute("BEGIN IMMEDIATE")
            for statement, rows in _statements(ops):
                self.connection.executemany(statement, rows)
            self.connection.execute("COMMIT")
        for entry in entries:
            if entry.query is not None:
                entry.result = entry.query(self.connection)


def _resolve(entry: _Entry, error: Exception | None) -> None:
    if entry.done.done():
        return
    if error is None:
        entry.done.set_result(entry.result)
    else:
        entry.done.set_exception(error)
        entry.done.exception()  # seen, also if its caller has given up


def _take_lock(folder: Path) -> int:
    """Only one process writes. The lock goes with the process, however it ends."""
    descriptor = os.open(folder / "ledger.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StoreUnavailable(f"another pool process is writing the ledger in {folder}") from error
    return descriptor


def _open(file: Path, owner: _Owner) -> sqlite3.Connection:
    connection = sqlite3.connect(file, timeout=5.0, isolation_level=None, check_same_thread=False)
    try:
        _prepare(connection, file, owner)
    except (StoreError, sqlite3.DatabaseError):
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, file: Path, owner: _Owner) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    known = connection.execute("SELECT name FROM sqlite_master WHERE name = 'meta'").fetchone()
    stored = read_meta(connection) if known else {}
    found = int(stored.get("schema", SCHEMA_VERSION))
    if found != SCHEMA_VERSION:
        raise StoreError(f"{file} has schema {found}; this pool writes schema {SCHEMA_VERSION}")
    if stored.get("job_uid", owner.job_uid) != owner.job_uid:
        raise StoreError(f"{file} belongs to job {stored['job_uid']}, not to {owner.job_uid}")
    if int(stored.get("generation", 0)) > owner.generation:
        raise StoreError(f"{file} is of generation {stored['generation']}; this pool was started as {owner.generation}")
    connection.execute("BEGIN IMMEDIATE")
    for statement in schema():
        connection.execute(statement)
    first = [meta("schema", SCHEMA_VERSION), meta("job_uid", owner.job_uid), meta("generation", owner.generation)]
    for statement, rows in _statements(first):
        connection.executemany(statement, rows)
    connection.execute("COMMIT")


# --- ops as SQL -------------------------------------------------------------------------------------------------


def _statements(ops: Iterable[Op]) -> Iterable[tuple[str, list[tuple[Value, ...]]]]:
    """Ops in order, neighbours with the same SQL together."""
    current, rows = "", list[tuple[Value, ...]]()
    for op in ops:
        for statement, values in _sql(op):
            if statement != current and rows:
                yield current, rows
                rows = []
            current = statement
            rows.append(values)
    if rows:
        yield current, rows


def _sql(op: Op) -> list[tuple[str, tuple[Value, ...]]]:
    match op:
        case Put(table, values):
            return [(_PUT[table], values)]
        case Delete(table, key):
            where = " AND ".join(f"{column} = ?" for column in columns(table)[: len(key)])
            return [(f"DELETE FROM {table} WHERE {where}", key)]
        case DeleteAbove(table, key):
            return [(f"DELETE FROM {table} WHERE {columns(table)[0]} > ?", (key,))]
        case DeleteBelow(table, key):
            return [(f"DELETE FROM {table} WHERE {columns(table)[0]} < ?", (key,))]
        case PruneStep(step):
            return [
                (f"DELETE FROM segments WHERE (pass, prompt) IN {_OF_STEP}", (step,)),
                (f"UPDATE samples SET kept = 0 WHERE (pass, prompt) IN {_OF_STEP}", (step,)),
            ]
        case HalveLoads():
            numbered = "SELECT seq, ROW_NUMBER() OVER (PARTITION BY slot ORDER BY seq) AS n FROM loads"
            return [(f"DELETE FROM loads WHERE seq IN (SELECT seq FROM ({numbered}) WHERE n % 2 = 0)", ())]
        case _:
            assert_never(op)


def _put(table: str) -> str:
    names = columns(table)
    values = f"({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    if table != "samples":
        return f"INSERT OR REPLACE INTO {table} {values}"
    # The slot stays after the sample has left it: the report shows which replica generated what.
    changes = [f"{name} = excluded.{name}" for name in names if name not in ("pass", "prompt", "idx", "slot")]
    sticky = "slot = COALESCE(excluded.slot, slot)"
    return f"INSERT INTO samples {values} ON CONFLICT DO UPDATE SET {', '.join([*changes, sticky])}"


_PUT = {table: _put(table) for table in TABLES}
_OF_STEP = "(SELECT pass, prompt FROM groups WHERE step = ?)"
