"""A new generation: a pool that has lost its store begins a new ledger from a checkpoint's snapshot.

Nothing that the earlier generation said after the snapshot counts. Its members register anew (their calls name the
older generation); what they were generating starts again; versions and incarnations jump, so that none is issued
twice even if the lost ledger knew later ones than the snapshot does.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from laminar.pool import rows, statements
from laminar.pool.rows import Op
from laminar.pool.store import Owner, StoreError, StoreUnavailable, lock_folder
from laminar.shell.audit import read_audit
from laminar.shell.ledger_file import (
    FILE_NAME,
    SCHEMA_VERSION,
    LedgerFileError,
    newer_schema,
    read_meta,
    schema,
    schema_of,
)
from laminar.shell.ledger_migrations import migrate

VERSION_STRIDE = 10_000
"""Versions of a generation begin at a multiple of this above all that its snapshot knows. The lost ledger can have
issued one a step and one an attempt since that checkpoint, and training ends after some missed checkpoints."""
INCARNATION_STRIDE = 1_000
FIRST_VERSION, FIRST_INCARNATION = "first_version", "first_incarnation"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The sealed folder whose snapshot is the beginning; `manifest` as it was registered."""

    folder: Path
    step: int
    attempt: int
    manifest: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Raises StoreError if it is no sealed checkpoint."""
        name = folder.name.split("-")
        try:
            step, attempt = int(name[1]), int(name[3])
            manifest = json.loads((folder / "manifest.json").read_bytes())
        except (OSError, ValueError, IndexError) as error:
            raise StoreError(f"{folder} is no sealed checkpoint: {error}") from error
        return cls(folder, step, attempt, {str(k): str(v) for k, v in manifest.items()})


def found_generation(folder: Path, owner: Owner, checkpoint: Path | None) -> bool:
    """Makes `folder`/ledger.sqlite, unless there is one, from `checkpoint` (None: of an empty job). True: made.

    All of the file or nothing of it is there afterwards, whatever ends the process. Raises StoreError,
    StoreUnavailable.
    """
    lock = lock_folder(folder)
    try:
        file = folder / FILE_NAME
        if owner.generation == 1 or file.exists():
            return False
        for leftover in folder.glob(f"{FILE_NAME}-*"):
            leftover.unlink()  # a log without its file
        new = folder / f"{FILE_NAME}.new"
        new.write_bytes(b"")
        if checkpoint is not None:
            new.write_bytes((checkpoint / "ledger.sqlite").read_bytes())
        _begin(new, owner, Checkpoint.read(checkpoint) if checkpoint is not None else None)
        if checkpoint is not None:
            _prove(new)
        _publish(new, file)
    except (OSError, sqlite3.DatabaseError) as error:
        raise StoreUnavailable(f"a new ledger in {folder} cannot be made: {error}") from error
    finally:
        os.close(lock)
    return True


def _begin(new: Path, owner: Owner, origin: Checkpoint | None) -> None:
    db = sqlite3.connect(new, isolation_level=None)
    try:
        found = schema_of(db)
        if found > SCHEMA_VERSION:
            raise StoreError(newer_schema(new, found))
        db.execute("BEGIN")
        if origin is not None:
            if found < SCHEMA_VERSION:
                migrate(db, found, SCHEMA_VERSION)
            uid = read_meta(db).get("job_uid")
            if uid != owner.job_uid:
                raise StoreError(f"the ledger in {origin.folder} belongs to job {uid}, not to {owner.job_uid}")
            _release(db)
            statements.apply(db, _origin_rows(db, owner, origin))
        else:
            for statement in schema():
                db.execute(statement)
            statements.apply(db, [rows.meta("schema", SCHEMA_VERSION), rows.meta("job_uid", owner.job_uid)])
        statements.apply(db, _marks(db, owner))
        db.execute("COMMIT")
    finally:
        db.close()


def _release(db: sqlite3.Connection) -> None:
    """Nobody holds anything: what was being generated starts again under a higher term, what was being graded waits."""
    running = "state = 'leased' OR (state = 'pending' AND version IS NOT NULL)"
    number, tokens = db.execute(f"SELECT COUNT(*), COALESCE(SUM(length), 0) FROM samples WHERE {running}").fetchone()
    db.execute(
        "UPDATE samples SET state = 'pending', term = term + 1, slot = NULL, incarnation = NULL, version = NULL, "
        f"length = 0, tools = '[]', restarts = restarts + 1 WHERE {running}"
    )
    db.execute("UPDATE samples SET term = term + 1, incarnation = NULL WHERE state = 'finished'")
    db.execute("UPDATE eval_samples SET term = term + 1, slot = NULL, incarnation = NULL WHERE done = 0")
    counters = json.loads(read_meta(db).get("counters", "{}"))
    counters["restarted_samples"] += number
    counters["restarted_tokens"] += tokens
    statements.apply(db, [rows.meta("counters", json.dumps(counters))])


def _origin_rows(db: sqlite3.Connection, owner: Owner, origin: Checkpoint) -> list[Op]:
    """The checkpoint is the only one that may be restored: the batches before it are not in its snapshot."""
    db.execute("UPDATE checkpoints SET state = 'removable'")
    first = int(db.execute("SELECT COALESCE(MAX(seq), 0) + 1 FROM events").fetchone()[0])
    text = f"generation {owner.generation} of the pool goes on from the ledger in {origin.folder.name}"
    manifest = json.dumps(origin.manifest)
    return [
        rows.Put("checkpoints", (origin.folder.name, origin.step, origin.attempt, manifest, "kept")),
        rows.Put("events", (first, time.time(), "generation", text)),
        rows.meta("restored_step", origin.step),
    ]


def _marks(db: sqlite3.Connection, owner: Owner) -> list[Op]:
    version = db.execute("SELECT COALESCE(MAX(version), 0) FROM versions").fetchone()[0]
    incarnation = db.execute("SELECT COALESCE(MAX(incarnation), 0) FROM members").fetchone()[0]
    db.execute("DELETE FROM members")  # they register anew
    before = owner.generation - 1
    return [
        rows.meta("generation", owner.generation),
        rows.meta(FIRST_VERSION, max(before, version // VERSION_STRIDE + 1) * VERSION_STRIDE),
        rows.meta(FIRST_INCARNATION, max(before, incarnation // INCARNATION_STRIDE + 1) * INCARNATION_STRIDE + 1),
    ]


def _prove(new: Path) -> None:
    try:
        report = read_audit(new)
    except LedgerFileError as error:
        raise StoreError(f"the snapshot cannot begin a new generation: {error}") from error
    if not report.ok:
        new.unlink()
        raise StoreError(f"the snapshot does not pass its audit: {'; '.join(report.violations[:3])}")


def _publish(new: Path, file: Path) -> None:
    descriptor = os.open(new, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    new.rename(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
