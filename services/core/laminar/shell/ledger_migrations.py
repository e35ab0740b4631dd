"""From each older schema of the ledger file to the next one, by which it can be told what every table was.

Invariant: a step changes rows only as far as the new tables ask for it, within the caller's transaction. Steps are
never changed after their release; `tests/data/ledger_vN` holds a file of each schema.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable


def migrate(connection: sqlite3.Connection, found: int, wanted: int) -> None:
    """Brings tables and rows from schema `found` to `wanted`. The caller commits."""
    for version in range(found, wanted):
        MIGRATIONS[version](connection)
    connection.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (str(wanted),))


def _from_1(connection: sqlite3.Connection) -> None:
    """Segments lie in the order of writing, with a checksum; old rows can be folded into `ended`; tools, poison."""
    connection.create_function("crc_of", 2, _crc)
    connection.execute("ALTER TABLE segments RENAME TO old_segments")
    connection.execute(
        "CREATE TABLE segments (pass INT NOT NULL, prompt INT NOT NULL, idx INT NOT NULL, start INT NOT NULL, "
        "tokens BLOB NOT NULL, logprobs BLOB NOT NULL, crc INT NOT NULL)"
    )
    connection.execute("INSERT INTO segments SELECT *, crc_of(tokens, logprobs) FROM old_segments")
    connection.execute("DROP TABLE old_segments")
    connection.execute("CREATE UNIQUE INDEX segments_by_sample ON segments (pass, prompt, idx, start)")
    connection.execute(
        "CREATE TABLE ended (step INT, reason TEXT, number INT NOT NULL, PRIMARY KEY (step, reason)) WITHOUT ROWID"
    )
    connection.execute("ALTER TABLE groups ADD COLUMN at_step INT NOT NULL DEFAULT 0")
    connection.execute("ALTER TABLE samples ADD COLUMN tools TEXT NOT NULL DEFAULT '[]'")
    connection.execute("ALTER TABLE samples ADD COLUMN lost_lives TEXT NOT NULL DEFAULT '[]'")


def _crc(tokens: bytes, logprobs: bytes) -> int:
    return zlib.crc32(logprobs, zlib.crc32(tokens))


MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {1: _from_1}
