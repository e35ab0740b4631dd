"""The store's operations as SQL on the ledger file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import assert_never

from laminar.pool.rows import Delete, DeleteAbove, DeleteBelow, FoldStep, HalveLoads, Op, PruneStep, Put, PutAll, Value
from laminar.shell.ledger_file import TABLES, columns

Row = tuple[Value, ...]

ROWS_A_STATEMENT = 32
"""Rows that one statement inserts: each statement gives up the interpreter's lock once, and must win it back from a
busy event loop."""


def apply(connection: sqlite3.Connection, ops: Iterable[Op]) -> None:
    """All of them, in order; the caller begins and commits."""
    for statement, rows in _statements(ops):
        connection.executemany(statement, rows)


def _statements(ops: Iterable[Op]) -> Iterable[tuple[str, Sequence[Row]]]:
    """Neighbours with the same SQL together."""
    current, rows = "", list[Row]()
    for op in ops:
        for statement, values in _bulk(op) if isinstance(op, PutAll) else _sql(op):
            if statement != current and rows:
                yield current, rows
                rows = []
            current = statement
            rows.append(values)
    if rows:
        yield current, rows


def _bulk(op: PutAll) -> Iterable[tuple[str, Row]]:
    """New rows, ROWS_A_STATEMENT at a time."""
    rows, whole = op.rows, len(op.rows) - len(op.rows) % ROWS_A_STATEMENT
    for first in range(0, whole, ROWS_A_STATEMENT):
        yield _INSERT_MANY[op.table], tuple(v for row in rows[first : first + ROWS_A_STATEMENT] for v in row)
    for row in rows[whole:]:
        yield _INSERT[op.table], row


def _sql(op: Op) -> list[tuple[str, Row]]:
    match op:
        case Put(table, values):
            return [(_PUT[table], values)]
        case PutAll():
            return list(_bulk(op))
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
        case FoldStep(step):
            return [
                (f"INSERT OR REPLACE INTO ended {_COUNT_ENDED}", (step, step, step)),
                *((f"DELETE FROM {table} WHERE (pass, prompt) IN {_ENDED}", (step, step)) for table in _KEYED),
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


def _insert(table: str, num_rows: int) -> str:
    values = f"({', '.join('?' * len(columns(table)))})"
    return f"INSERT INTO {table} VALUES {', '.join([values] * num_rows)}"


_PUT = {table: _put(table) for table in TABLES}
_INSERT = {table: _insert(table, 1) for table in TABLES}
_INSERT_MANY = {table: _insert(table, ROWS_A_STATEMENT) for table in TABLES}
_OF_STEP = "(SELECT pass, prompt FROM groups WHERE step = ?)"
_ENDED = (
    "(SELECT pass, prompt FROM groups WHERE state = 'consumed' AND step = ? "
    "UNION ALL SELECT pass, prompt FROM groups WHERE state = 'discarded' AND at_step < ?)"
)
_COUNT_ENDED = (
    "SELECT ?, CASE state WHEN 'consumed' THEN '' ELSE reason END AS why, COUNT(*) FROM samples "
    f"WHERE (pass, prompt) IN {_ENDED} GROUP BY why"
)
# Groups last: they say which rows are meant.
_KEYED = ("segments", "samples", "groups")
