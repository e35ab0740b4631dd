"""The ledger as it is written beside a checkpoint: what a pool that has lost its store goes on from.

It is a ledger file itself, small: `laminar audit` proves it, and a later release migrates it. What has ended is in it
by number only; what is open, and the batches after the checkpoint's step, which training from there takes again, are
in it with their tokens. Responses that are being generated are in it without: the next generation starts them anew.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from laminar.shell.ledger_file import columns, open_ledger, schema

EVENTS = 500
"""The newest of them, so that people see what was before."""
_WHOLE = ("meta", "members", "versions", "batches", "steps", "checkpoints", "rounds", "eval_samples", "ended")
_OPEN = "(g.state IN ('open', 'ready', 'batched') OR (g.state = 'consumed' AND g.step > ?))"
_OF_OPEN = f"JOIN groups g ON g.pass = s.pass AND g.prompt = s.prompt WHERE {_OPEN}"
# Rows of running samples do not say how long they are.
_PARTIAL = (
    "SELECT SUM(LENGTH(t.tokens)) / 4, s.pass, s.prompt, s.idx FROM samples s JOIN segments t "
    "ON t.pass = s.pass AND t.prompt = s.prompt AND t.idx = s.idx WHERE s.state IN ('pending', 'leased') "
    "GROUP BY s.pass, s.prompt, s.idx"
)
_STOPPED = "s.state IN ('finished', 'graded', 'batched', 'consumed')"


def make_snapshot(file: Path, step: int) -> bytes:
    """Of the ledger at `file` for the checkpoint of `step`: the bytes of a ledger file. Raises LedgerFileError."""
    copy = sqlite3.connect(":memory:", isolation_level=None)
    try:
        with open_ledger(file) as db:
            for statement in schema():
                copy.execute(statement)
            copy.execute("BEGIN")
            for table in _WHOLE:
                _copy(db, copy, table, "s", ())
            _copy(db, copy, "events", f"s WHERE seq > (SELECT MAX(seq) FROM events) - {EVENTS}", ())
            _copy(db, copy, "groups", f"g WHERE {_OPEN}", (step,), "g")
            _copy(db, copy, "samples", f"s {_OF_OPEN}", (step,))
            tokens = "JOIN samples t ON t.pass = s.pass AND t.prompt = s.prompt AND t.idx = s.idx"
            kept = f"s {tokens} {_OF_OPEN} AND {_STOPPED.replace('s.', 't.')}"
            _copy(db, copy, "segments", kept, (step,))
            copy.executemany(
                "UPDATE samples SET length = ? WHERE (pass, prompt, idx) = (?, ?, ?)", db.execute(_PARTIAL)
            )
            copy.executemany("INSERT OR REPLACE INTO ended VALUES (?, ?, ?)", _ended(db, step))
            copy.execute("COMMIT")
        return copy.serialize()
    finally:
        copy.close()


def _copy(
    source: sqlite3.Connection,
    target: sqlite3.Connection,
    table: str,
    where: str,
    values: Iterable[int],
    name: str = "s",
) -> None:
    names = columns(table)
    found = source.execute(f"SELECT {', '.join(f'{name}.{c}' for c in names)} FROM {table} {where}", tuple(values))
    target.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})", map(tuple, found))


def _ended(db: sqlite3.Connection, step: int) -> list[tuple[int, str, int]]:
    """Numbers of the ended samples whose rows stay behind, added to what is folded already."""
    numbers: dict[tuple[int, str], int] = {}
    found = db.execute(
        "SELECT CASE g.state WHEN 'consumed' THEN g.step ELSE g.at_step END, "
        "CASE s.state WHEN 'consumed' THEN '' ELSE s.reason END, COUNT(*) FROM samples s "
        "JOIN groups g ON g.pass = s.pass AND g.prompt = s.prompt "
        "WHERE (g.state = 'consumed' AND g.step <= ?) OR g.state = 'discarded' GROUP BY 1, 2", (step,),
    )  # fmt: skip
    for at_step, reason, number in found:
        numbers[at_step, reason] = number
    for at_step, reason, number in db.execute("SELECT step, reason, number FROM ended"):
        if (at_step, reason) in numbers:
            numbers[at_step, reason] += number
    return [(at_step, reason, number) for (at_step, reason), number in numbers.items()]
