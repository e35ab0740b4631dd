"""The pool's ledger file: its tables, and what may be read from it by others, with the pool alive or dead.

The pool alone writes (laminar.pool.store). `laminar audit`, `report`, `samples` and `status` of a dead run open the
same SQLite file read-only; nothing here ever creates or changes a file's rows.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.core.evaluation import EvalKey, EvalPoint, EvalSample, EvaluationRound
from laminar.shell.ledger_migrations import migrate
from laminar.wire.messages import EngineLoad, EvaluationRow, Event, StepRow

SCHEMA_VERSION = 2
"""Raised whenever a table changes; an older program refuses a newer file."""
FILE_NAME = "ledger.sqlite"

TABLES: dict[str, tuple[str, ...]] = {
    # key/value: schema, job_uid, spec_digest, data_digest, generation, counters, position, committed_step, attempt ...
    "meta": ("key TEXT PRIMARY KEY", "value TEXT NOT NULL"),
    "members": ("slot TEXT PRIMARY KEY", "incarnation INT NOT NULL", "fenced INT NOT NULL", "register TEXT NOT NULL"),
    "versions": (
        "version INTEGER PRIMARY KEY", "step INT NOT NULL", "parent INT", "attempt INT NOT NULL",
        "state TEXT NOT NULL", "digest TEXT NOT NULL",
    ),
    # `at_step`: steps that were committed when the row was written last.
    "groups": (
        "pass INT", "prompt INT", "state TEXT NOT NULL", "ready_seq INT NOT NULL", "step INT",
        "prompt_text TEXT NOT NULL", "answer TEXT NOT NULL", "at_step INT NOT NULL DEFAULT 0",
        "PRIMARY KEY (pass, prompt)",
    ),
    # `slot` is the last one that wrote the sample; it holds it still if `incarnation` is not null. `kept`: its
    # tokens are stored. `length` is final from `finished` on. `tools`: JSON list of [start, length, call], tokens that
    # are no model's. `lost_lives`: JSON list of [slot, incarnation, died] of lives that ran it when they were lost.
    "samples": (
        "pass INT", "prompt INT", "idx INT", "state TEXT NOT NULL", "term INT NOT NULL", "slot TEXT",
        "incarnation INT", "version INT", "length INT NOT NULL", "kept INT NOT NULL", "finish_reason TEXT NOT NULL",
        "reward REAL NOT NULL", "parts TEXT NOT NULL", "failures INT NOT NULL", "restarts INT NOT NULL",
        "moves INT NOT NULL", "inherent INT", "across_rollback INT NOT NULL", "reason TEXT", "detail TEXT NOT NULL",
        "leased_wall_s REAL NOT NULL", "finished_wall_s REAL NOT NULL", "tools TEXT NOT NULL DEFAULT '[]'",
        "lost_lives TEXT NOT NULL DEFAULT '[]'", "PRIMARY KEY (pass, prompt, idx)",
    ),
    # In the order of writing, with an index beside it: rows that lie by key would touch a page each.
    # crc: zlib.crc32 of tokens, then log-probs.
    "segments": (
        "pass INT NOT NULL", "prompt INT NOT NULL", "idx INT NOT NULL", "start INT NOT NULL", "tokens BLOB NOT NULL",
        "logprobs BLOB NOT NULL", "crc INT NOT NULL",
    ),
    # Samples whose rows are gone, by the step with which they went; reason '': consumed in that step.
    "ended": ("step INT", "reason TEXT", "number INT NOT NULL", "PRIMARY KEY (step, reason)"),
    # groups: JSON list of "pass/prompt", in the sealed order
    "batches": ("step INTEGER PRIMARY KEY", "groups TEXT NOT NULL", "sealed_wall_s REAL NOT NULL"),
    "steps": ("step INTEGER PRIMARY KEY", "row TEXT NOT NULL"),
    "checkpoints": (
        "path TEXT PRIMARY KEY", "step INT NOT NULL", "attempt INT NOT NULL", "manifest TEXT NOT NULL",
        "state TEXT NOT NULL",
    ),
    "rounds": ("point TEXT PRIMARY KEY", "version INT NOT NULL"),
    "eval_samples": (
        "id TEXT PRIMARY KEY", "point TEXT NOT NULL", "term INT NOT NULL", "slot TEXT", "incarnation INT",
        "done INT NOT NULL", "reward REAL", "length INT NOT NULL", "finish_reason TEXT NOT NULL",
    ),
    "events": ("seq INTEGER PRIMARY KEY", "wall_s REAL NOT NULL", "kind TEXT NOT NULL", "text TEXT NOT NULL"),
    "loads": ("seq INTEGER PRIMARY KEY", "wall_s REAL NOT NULL", "slot TEXT NOT NULL", "version INT",
        "load TEXT NOT NULL"),
}  # fmt: skip
WITHOUT_ROWID = frozenset({"members", "groups", "samples", "ended"})
INDEXES = (
    "CREATE INDEX IF NOT EXISTS groups_by_step ON groups (step) WHERE step IS NOT NULL",
    "CREATE UNIQUE INDEX IF NOT EXISTS segments_by_sample ON segments (pass, prompt, idx, start)",
)


def columns(table: str) -> tuple[str, ...]:
    """Column names in the order of the table's definition."""
    return tuple(part.split()[0] for part in TABLES[table] if not part.startswith("PRIMARY KEY"))


def schema() -> list[str]:
    """Statements that make every table that is not there yet."""
    made = [
        f"CREATE TABLE IF NOT EXISTS {name} ({', '.join(parts)}){' WITHOUT ROWID' if name in WITHOUT_ROWID else ''}"
        for name, parts in TABLES.items()
    ]
    return [*made, *INDEXES]


class LedgerFileError(ValueError):
    """The file is missing, is no ledger, or is of another schema; the text is for people."""


@contextmanager
def open_ledger(path: Path) -> Generator[sqlite3.Connection]:
    """The ledger of a file, or of a folder that holds it, read-only in one consistent snapshot.

    Works beside a running pool (its newest commits are seen) and after its death. A file of an older schema is read
    as a migrated copy in memory. Raises LedgerFileError.
    """
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise LedgerFileError(f"there is no ledger at {file}")
    connection = _connect(file)
    try:
        connection.execute("BEGIN")
        found = schema_of(connection)
        if found > SCHEMA_VERSION:
            raise LedgerFileError(newer_schema(file, found))
        if found < SCHEMA_VERSION:
            connection = _migrated(connection, found)
        connection.row_factory = sqlite3.Row
        connection.create_function("crc", 2, crc, deterministic=True)
        yield connection
    except sqlite3.DatabaseError as error:
        raise LedgerFileError(f"{file} cannot be read as a ledger: {error}") from error
    finally:
        connection.close()


def schema_of(connection: sqlite3.Connection) -> int:
    """Of a file that no pool has begun, this program's own."""
    known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
    return int(read_meta(connection).get("schema", SCHEMA_VERSION)) if known else SCHEMA_VERSION


def newer_schema(file: Path, found: int) -> str:
    """Why such a file is refused, for people."""
    return (
        f"{file} has schema {found}, and this release of Laminar knows schemas up to {SCHEMA_VERSION}: a newer release "
        "wrote it. Nothing was changed. Use that release, or a newer one, on this run."
    )


def crc(tokens: bytes, logprobs: bytes) -> int:
    """Of one segment."""
    return zlib.crc32(logprobs, zlib.crc32(tokens))


def _migrated(file: sqlite3.Connection, found: int) -> sqlite3.Connection:
    copy = sqlite3.connect(":memory:", isolation_level=None)
    file.backup(copy)
    file.close()
    migrate(copy, found, SCHEMA_VERSION)
    return copy


def _connect(file: Path) -> sqlite3.Connection:
    """Read-only, and without making a file: where there is no log, no writer is alive: it is read as it lies."""
    uri = file.resolve().as_uri()
    lone = not file.with_name(file.name + "-wal").exists()
    try:
        connection = sqlite3.connect(f"{uri}?mode=ro{'&immutable=1' if lone else ''}", uri=True, timeout=5.0)
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    except sqlite3.DatabaseError as error:
        raise LedgerFileError(f"{file} cannot be read as a ledger: {error}") from error
    return connection


def read_meta(connection: sqlite3.Connection) -> dict[str, str]:
    """The key/value table."""
    return {str(key): str(value) for key, value in connection.execute("SELECT key, value FROM meta")}


def read_steps(connection: sqlite3.Connection) -> list[StepRow]:
    """Committed steps of the surviving lineage, in order."""
    rows = connection.execute("SELECT row FROM steps ORDER BY step")
    return [StepRow.model_validate_json(row[0]) for row in rows]


def read_events(connection: sqlite3.Connection) -> list[Event]:
    """The newest events, oldest first."""
    rows = connection.execute("SELECT seq, wall_s, kind, text FROM events ORDER BY seq")
    return [Event(seq=seq, wall_s=wall_s, kind=kind, text=text) for seq, wall_s, kind, text in rows]


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """What one replica carried at one moment."""

    wall_s: float
    slot: str
    version: int | None
    load: EngineLoad


def read_loads(connection: sqlite3.Connection) -> list[LoadPoint]:
    """Load of every replica over time, oldest first; thinned out in long runs."""
    rows = connection.execute("SELECT wall_s, slot, version, load FROM loads ORDER BY seq")
    return [
        LoadPoint(wall_s, slot, version, EngineLoad.model_validate_json(load)) for wall_s, slot, version, load in rows
    ]


@dataclass(frozen=True, slots=True)
class StoredVersion:
    version: int
    step: int
    parent: int | None
    attempt: int
    state: str
    digest: str


def read_versions(connection: sqlite3.Connection) -> list[StoredVersion]:
    """Every publication, oldest first."""
    return [StoredVersion(*row) for row in connection.execute("SELECT * FROM versions ORDER BY version")]


def read_rounds(connection: sqlite3.Connection) -> dict[EvalPoint, EvaluationRound]:
    """Evaluations at each point of the run, done or under way; nobody holds their samples."""
    rounds: dict[EvalPoint, EvaluationRound] = {}
    for point, version in connection.execute("SELECT point, version FROM rounds").fetchall():
        rows = connection.execute(
            "SELECT id, term, done, reward, length, finish_reason FROM eval_samples WHERE point = ?", (point,)
        )
        samples = [
            EvalSample(
                EvalKey.parse(row[0]), row[1], done=bool(row[2]), reward=row[3], length=row[4], finish_reason=row[5]
            )
            for row in rows
        ]
        rounds[EvalPoint(point)] = EvaluationRound.restore(EvalPoint(point), version, samples)
    return rounds


def evaluation_rows(round_: EvaluationRound, step: int) -> list[EvaluationRow]:
    """The results of one round as `status` and the report show them; `step` is that of the round's version."""
    return [
        EvaluationRow(
            name=result.name, point=result.point.value, mode=result.mode.value, version=round_.version, step=step,
            num_items=result.num_items, num_graded=result.num_graded, mean=result.mean, stderr=result.stderr,
        )
        for result in round_.results()
    ]  # fmt: skip


def read_evaluations(connection: sqlite3.Connection) -> list[EvaluationRow]:
    """Results of all rounds that are done, the first point before the last."""
    steps = {version.version: version.step for version in read_versions(connection)}
    done = [round_ for _, round_ in sorted(read_rounds(connection).items()) if round_.done]
    return [row for round_ in done for row in evaluation_rows(round_, steps[round_.version])]


@dataclass(frozen=True, slots=True)
class StoredSample:
    """One trajectory. `tokens` is None where they are no longer kept; `slot`: the replica that wrote it last."""

    id: str
    step: int | None
    state: str
    slot: str | None
    version: int | None
    length: int
    reward: float
    parts: dict[str, float]
    finish_reason: str
    reason: str | None
    detail: str
    restarts: int
    moves: int
    inherent: int | None
    leased_wall_s: float
    finished_wall_s: float
    prompt_text: str
    answer: str
    tokens: bytes | None


_SAMPLES = """
SELECT s.*, g.step AS step, g.prompt_text AS prompt_text, g.answer AS answer
FROM samples s JOIN groups g ON g.pass = s.pass AND g.prompt = s.prompt
"""


def read_samples(
    connection: sqlite3.Connection, *, step: int | None = None, with_tokens: bool = False
) -> Iterator[StoredSample]:
    """All trajectories, or those that one step used; with their tokens (int32, little-endian) where still kept."""
    where, values = ("", ()) if step is None else (" WHERE g.step = ? AND s.state IN ('batched', 'consumed')", (step,))
    for row in connection.execute(f"{_SAMPLES}{where} ORDER BY s.pass, s.prompt, s.idx", values):
        tokens = _tokens(connection, row) if with_tokens and row["kept"] else None
        yield StoredSample(
            id=f"{row['pass']}/{row['prompt']}/{row['idx']}", step=row["step"], state=row["state"], slot=row["slot"],
            version=row["version"], length=row["length"], reward=row["reward"], parts=json.loads(row["parts"]),
            finish_reason=row["finish_reason"], reason=row["reason"], detail=row["detail"], restarts=row["restarts"],
            moves=row["moves"], inherent=row["inherent"], leased_wall_s=row["leased_wall_s"],
            finished_wall_s=row["finished_wall_s"], prompt_text=row["prompt_text"], answer=row["answer"], tokens=tokens,
        )  # fmt: skip


def _tokens(connection: sqlite3.Connection, row: Any) -> bytes:
    parts = connection.execute(
        "SELECT tokens FROM segments WHERE pass = ? AND prompt = ? AND idx = ? ORDER BY start",
        (row["pass"], row["prompt"], row["idx"]),
    )
    return b"".join(bytes(part[0]) for part in parts)
