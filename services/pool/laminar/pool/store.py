"""The pool's store: what was acknowledged is on disk.

    submit(ops) --queue--> writer thread: one transaction for all that waits, fsync --> every future in it is done
                           folder thread: moves what is in the log into the file, beside the writer

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from laminar.core.samples import Group, SealedBatch
from laminar.pool import statements
from laminar.pool.restore import Stored, consumed_after, read_all
from laminar.pool.rows import Op, meta
from laminar.pool.snapshot import make_snapshot
from laminar.shell.ledger_file import FILE_NAME, SCHEMA_VERSION, newer_schema, read_meta, schema, schema_of
from laminar.shell.ledger_migrations import migrate

T = TypeVar("T")

WINDOW_S = 0.005
"""How long the first commit waits for company: half of the 10 ms that a ledger move may cost."""
RETRY_S = 0.5
"""A full disk is tried again this often: freed space shows within a second, and the wait costs nothing."""
FOLD_EVERY_S = 4.0
"""The log is moved into the file this often: pages that were written many times since are moved once. At 30 MB/s it
grows to 120 MB, which a restarted pool reads in a fraction of a second."""
CACHE_KIB = 32 * 1024
"""Pages kept in memory. The index over 8,192 running trajectories of 16K tokens has 20 MB."""
_WAITS = {
    sqlite3.SQLITE_FULL: "DiskFull",
    sqlite3.SQLITE_IOERR: "DiskFailing",
    sqlite3.SQLITE_CANTOPEN: "DiskFailing",
    sqlite3.SQLITE_BUSY: "StoreBusy",
    sqlite3.SQLITE_LOCKED: "StoreBusy",
}
"""Errors that may pass, by SQLite's primary code, and the condition that people see meanwhile. A transaction whose
sync failed is written again whole, so no page is left of which only the kernel's cache knows."""
_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class StoreError(ValueError):
    """The store cannot be used: damaged, of another job, or of a newer program; the text is for people."""


class StoreUnavailable(StoreError):
    """The store cannot be opened now: in use, or the disk is full or failing. Later it may be."""


class Store(Protocol):
    """Where the pool's truth survives its process. Every read sees everything submitted before it."""

    @property
    def condition(self) -> tuple[str, str] | None:
        """(reason, sentence) while nothing can be written; None when all is well."""
        ...

    def submit(self, ops: Sequence[Op]) -> asyncio.Future[None]:
        """Done once these and all earlier ops are durable, however long that takes; must not be cancelled."""
        ...

    async def load(self) -> Stored:
        """What a restarted pool goes on from."""
        ...

    async def consumed_after(self, step: int) -> list[tuple[SealedBatch, list[Group]]]:
        """The consumed batches later than `step`, with their groups, samples and tokens, in the sealed order."""
        ...

    async def snapshot(self, step: int) -> bytes:
        """What a new generation goes on from if it restores the checkpoint of `step`: see `laminar.pool.snapshot`."""
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
class Owner:
    """Whose ledger it is."""

    job_uid: str
    generation: int


class SqliteStore:
    """See `Store`. One file, one writing process (a lock file beside it), one writer thread; others read (WAL)."""

    def __init__(self, folder: Path, owner: Owner) -> None:
        """Opens or makes `folder`/ledger.sqlite. Raises StoreError, StoreUnavailable."""
        self._condition: tuple[str, str] | None = None
        self._queue: deque[_Entry] = deque()
        self._wake = threading.Condition()
        self._closing = threading.Event()
        self._file = folder / FILE_NAME
        self.on_commit: Callable[[float], None] = lambda _: None
        """Told the seconds of each transaction, on the writer thread."""
        self._lock = lock_folder(folder)
        try:
            self.connection = open_database(self._file, owner)
            self._folder = _LogFolder(self._file)
        except StoreError:
            os.close(self._lock)
            raise
        self._thread = threading.Thread(target=self._write_all, name="store", daemon=True)
        self._thread.start()

    @property
    def condition(self) -> tuple[str, str] | None:
        return self._condition

    def submit(self, ops: Sequence[Op]) -> asyncio.Future[None]:
        return self._enqueue(ops, None)

    async def load(self) -> Stored:
        """Raises StoreError if what was written makes no sense any more."""
        try:
            return await self._read(read_all)
        except (sqlite3.DatabaseError, ValueError, LookupError) as error:
            raise StoreError(_damaged(self._file, f"{type(error).__name__}: {error}")) from error

    async def consumed_after(self, step: int) -> list[tuple[SealedBatch, list[Group]]]:
        return await self._read(lambda db: consumed_after(db, step))

    async def snapshot(self, step: int) -> bytes:
        await self.submit(())
        # On a connection and a thread of its own: it takes as long as its size asks for, and nobody waits behind it.
        return await asyncio.to_thread(make_snapshot, self._file, step)

    def close(self) -> None:
        self._closing.set()
        with self._wake:
            self._wake.notify()
        self._thread.join()
        self._folder.close()
        self.connection.close()
        os.close(self._lock)

    async def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        result: T = await asyncio.shield(self._enqueue((), query))
        return result

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
            entries[0].loop.call_soon_threadsafe(_resolve, entries, outcome)
            if outcome is not None:
                return
            self._folder.after_commit(self.connection)

    def _until_written(self, entries: list[_Entry]) -> Exception | None:
        """Tries again while the error may pass; the error that will not, else None."""
        while True:
            if self._folder.failure is not None:
                return self._folder.failure
            started_s = time.monotonic()
            try:
                self._transaction(entries)
            except sqlite3.Error as error:
                if self.connection.in_transaction:
                    self.connection.rollback()
                reason = _WAITS.get(_code(error))
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
            statements.apply(self.connection, ops)
            self.connection.execute("COMMIT")
        for entry in entries:
            if entry.query is not None:
                entry.result = entry.query(self.connection)


class _LogFolder:
    """Moves the log into the file beside the writer, which would stand still for it otherwise.

    Invariant: the log starts anew only when all of it is in the file, which under a steady load no thread but the
    writer can see to: it moves the rest, some pages, once this one has moved the bulk.
    """

    def __init__(self, file: Path) -> None:
        self.failure: sqlite3.Error | None = None
        """What ends the store; never an error that may pass."""
        self._connection = _connect(file)
        self._next_s = time.monotonic() + FOLD_EVERY_S
        self._asked, self._moved, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-fold", daemon=True)
        self._thread.start()

    def after_commit(self, writer: sqlite3.Connection) -> None:
        """Called by the writer between two transactions."""
        if self._moved.is_set():
            self._moved.clear()
            self.failure = self.failure or _move(writer)
            self._next_s = time.monotonic() + FOLD_EVERY_S
        elif time.monotonic() >= self._next_s:
            self._next_s = float("inf")  # until it is done
            self._asked.set()

    def close(self) -> None:
        self._closing.set()
        self._asked.set()
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while True:
            self._asked.wait()
            # Cleared before the look at `_closing`, which is set before `_asked`: an end is never missed.
            self._asked.clear()
            if self._closing.is_set():
                return
            self.failure = self.failure or _move(self._connection)
            self._moved.set()


def _move(connection: sqlite3.Connection) -> sqlite3.Error | None:
    """As much of the log as nobody reads any more; waits for nobody. Returns an error that will not pass."""
    try:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    except sqlite3.Error as error:
        # A full or failing disk: the log has it all, the next commit shows it, and the next turn tries again.
        return None if _code(error) in _WAITS else error
    return None


def _resolve(entries: Sequence[_Entry], error: Exception | None) -> None:
    for entry in entries:
        if entry.done.done():
            continue
        if error is None:
            entry.done.set_result(entry.result)
        else:
            entry.done.set_exception(error)
            entry.done.exception()  # seen, also if its caller has given up


def lock_folder(folder: Path) -> int:
    """A descriptor that holds the lock of a store's folder; only one process writes there.

    The lock goes with the process, however it ends. Raises StoreUnavailable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "ledger.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreUnavailable(f"the ledger in {folder} cannot be opened: {error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StoreUnavailable(f"another pool process is writing the ledger in {folder}") from error
    return descriptor


def open_database(file: Path, owner: Owner) -> sqlite3.Connection:
    """Checked, migrated and marked as `owner`'s; made if it is not there. Raises StoreError, StoreUnavailable."""
    connection = None
    try:
        connection = _connect(file)
        _prepare(connection, file, owner)
    except StoreError:
        assert connection is not None
        connection.close()
        raise
    except (OSError, sqlite3.DatabaseError) as error:
        if connection is not None:
            connection.close()
        if isinstance(error, sqlite3.Error) and _code(error) in _DAMAGE:
            raise StoreError(_damaged(file, str(error))) from error
        raise StoreUnavailable(f"the ledger {file} cannot be opened: {error}") from error
    return connection


def _connect(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(file, timeout=5.0, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA wal_autocheckpoint=0")
    connection.execute(f"PRAGMA cache_size=-{CACHE_KIB}")
    return connection


def _prepare(connection: sqlite3.Connection, file: Path, owner: Owner) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise StoreError(_damaged(file, problem))
    found = schema_of(connection)
    if found > SCHEMA_VERSION:
        raise StoreError(newer_schema(file, found))
    stored = read_meta(connection) if connection.execute(_HAS_META).fetchone() else {}
    if stored.get("job_uid", owner.job_uid) != owner.job_uid:
        raise StoreError(f"{file} belongs to job {stored['job_uid']}, not to {owner.job_uid}")
    generation = int(stored.get("generation", owner.generation))
    if generation > owner.generation:
        raise StoreError(f"{file} is of generation {generation}; this pool was started as {owner.generation}")
    if generation < owner.generation:
        raise StoreError(
            f"{file} is of generation {generation}, and generation {owner.generation} has taken the job over since: "
            "what it holds does not count any more. Move it away."
        )
    connection.execute("BEGIN IMMEDIATE")
    if found < SCHEMA_VERSION:
        migrate(connection, found, SCHEMA_VERSION)
    for statement in schema():
        connection.execute(statement)
    first = [meta("schema", SCHEMA_VERSION), meta("job_uid", owner.job_uid), meta("generation", owner.generation)]
    statements.apply(connection, first)
    connection.execute("COMMIT")


_HAS_META = "SELECT 1 FROM sqlite_master WHERE name = 'meta'"


def _damaged(file: Path, problem: str) -> str:
    return (
        f"the ledger {file} is damaged ({problem}), and nothing in it can be trusted. Put back a copy of the folder, "
        "or move it away: a new generation then goes on from the newest checkpoint (docs/failures.md)."
    )


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary code; 0: not SQLite's own."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
