"""The pool, ending itself by SIGKILL at every place where a decision becomes durable, once at each.

A place is a kind of decision (an arrow of the sample table, or a table of the ledger that gets rows) at one of three
moments: decided and not written, written and not committed, committed and not answered. Places that were reached are
lines of the file CRASHES; the next life goes past them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import laminar.pool.__main__ as program
from laminar.core.samples import Sample, SampleEvent
from laminar.pool import statements
from laminar.pool.rows import Op, Put
from laminar.pool.store import SqliteStore
from laminar.shell.service import start

REACHED = Path(os.environ["CRASHES"])
MOMENTS = ("decided", "written", "committed")
arrows: list[str] = []
"""Since the last call of `submit`."""
decide = Sample.move_to


def noted(self: Sample, event: SampleEvent) -> None:
    before = self.state
    decide(self, event)
    arrows.append(f"{before.value} {event.value}")


class Batch(list[Op]):
    """Ops with the arrows that they come from."""

    def __init__(self, ops: Sequence[Op]) -> None:
        super().__init__(ops)
        self.kinds = [*arrows, *sorted({op.table for op in ops if isinstance(op, Put)})]
        arrows.clear()


class CrashingStore(SqliteStore):
    def submit(self, ops: Sequence[Op]):
        return super().submit(Batch(ops))

    def _transaction(self, entries) -> None:
        kinds = [kind for entry in entries if isinstance(entry.ops, Batch) for kind in entry.ops.kinds]
        crash_at(kinds, "decided")
        if not crashed(kinds, "written"):
            self.connection.execute("BEGIN IMMEDIATE")
            statements.apply(self.connection, [op for entry in entries for op in entry.ops])
            crash_at(kinds, "written")
        super()._transaction(entries)
        crash_at(kinds, "committed")


def new(kinds: list[str], moment: str) -> list[str]:
    reached = set(REACHED.read_text().splitlines())
    return [place for kind in dict.fromkeys(kinds) if (place := f"{kind} {moment}") not in reached]


def crashed(kinds: list[str], moment: str) -> bool:
    return not new(kinds, moment)


def crash_at(kinds: list[str], moment: str) -> None:
    if places := new(kinds, moment):
        with REACHED.open("a") as file:
            file.writelines(f"{place}\n" for place in places)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    Sample.move_to = noted
    program.SqliteStore = CrashingStore
    start(program.main)
