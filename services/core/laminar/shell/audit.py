"""The audit: proves from the ledger's rows that nothing was lost and nothing was used twice.

    admitted = consumed (in the surviving lineage) + discarded + open

and, for every consumed sample: one version, made visible with a known digest; exactly one batch; its response as
long as was recorded, and as it was written. The rows are counted anew; the pool's own counters are only compared with
them. Of samples that ended long ago the number by step and reason stands for their rows.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from laminar.shell.ledger_file import LedgerFileError, open_ledger, read_meta, read_steps

MAX_EXAMPLES = 5
"""Samples named in one violation; the number is exact."""
_OPEN = ("pending", "leased", "finished", "graded", "batched")


@dataclass(frozen=True, slots=True)
class AuditReport:
    """`violations` is empty if and only if the equation and all its side conditions hold."""

    job_uid: str
    admitted: int
    consumed: int
    discarded: dict[str, int]
    open: int
    committed_step: int
    restarted_samples: int
    restarted_tokens: int
    moved_samples: int
    refused: dict[str, int]
    violations: list[str] = field(default_factory=list[str])

    @property
    def ok(self) -> bool:
        return not self.violations

    @property
    def equation(self) -> str:
        """One line for people."""
        discarded = sum(self.discarded.values())
        sign = "=" if self.admitted == self.consumed + discarded + self.open else "!="
        return f"{self.admitted} admitted {sign} {self.consumed} consumed + {discarded} discarded + {self.open} open"


def read_audit(path: Path) -> AuditReport:
    """Audits a ledger file, or the folder that holds it, beside a running pool or after its death.

    Raises LedgerFileError if there is nothing to audit.
    """
    with open_ledger(path) as db:
        meta = read_meta(db)
        if "counters" not in meta:
            raise LedgerFileError("the job had not begun when its pool ended")
        states = Counter(
            {str(state): int(n) for state, n in db.execute("SELECT state, COUNT(*) FROM samples GROUP BY state")}
        )
        reasons = {
            str(reason): int(n)
            for reason, n in db.execute(
                "SELECT reason, COUNT(*) FROM samples WHERE state = 'discarded' GROUP BY reason"
            )
        }
        for reason, number in db.execute("SELECT reason, SUM(number) FROM ended GROUP BY reason"):
            states["discarded" if reason else "consumed"] += int(number)
            if reason:
                reasons[reason] = reasons.get(reason, 0) + int(number)
        counters = json.loads(meta["counters"])
        committed = int(meta["committed_step"])
        report = AuditReport(
            job_uid=meta["job_uid"],
            admitted=int(counters["admitted"]),
            consumed=states["consumed"],
            discarded=reasons,
            open=sum(states[state] for state in _OPEN),
            committed_step=committed,
            restarted_samples=counters["restarted_samples"],
            restarted_tokens=counters["restarted_tokens"],
            moved_samples=counters["moved_samples"],
            refused=counters["refused"],
        )
        for check in (
            _equation(report, states, counters),
            _versions(db),
            _batches(db, committed),
            _steps(db, committed),
        ):
            report.violations.extend(check)
        report.violations.extend(_lengths(db))
    return report


def _equation(report: AuditReport, states: Counter[str], counters: dict[str, object]) -> Iterator[str]:
    rows = states.total()
    if rows != report.admitted:
        yield f"{report.admitted} samples were admitted, {rows} have a row"
    if report.admitted != report.consumed + sum(report.discarded.values()) + report.open:
        yield f"the equation does not hold: {report.equation}"
    if counters["consumed"] != report.consumed:
        yield f"the pool counted {counters['consumed']} consumed samples, {report.consumed} rows say so"
    if counters["discarded"] != report.discarded:
        yield f"the pool counted {counters['discarded']} discarded samples, the rows say {report.discarded}"


def _versions(db: sqlite3.Connection) -> Iterator[str]:
    """One version per used sample, visible, with its digest."""
    used = "FROM samples s LEFT JOIN versions v ON v.version = s.version WHERE s.state IN ('batched', 'consumed')"
    yield from _named(db, f"{used} AND s.version IS NULL", "used samples have no version")
    yield from _named(
        db, f"{used} AND s.version IS NOT NULL AND (v.state IS NULL OR v.state != 'visible' OR v.digest = '')",
        "used samples come from a version that never became visible with a known digest",
    )  # fmt: skip


def _batches(db: sqlite3.Connection, committed: int) -> Iterator[str]:
    """Batches name each group once; a committed step consumed exactly what was sealed for it."""
    seen: dict[str, int] = {}
    sealed: dict[int, set[str]] = {}
    for step, text in db.execute("SELECT step, groups FROM batches ORDER BY step"):
        names: list[str] = json.loads(text)
        sealed[step] = set(names)
        if len(names) != len(sealed[step]):
            yield f"batch {step} names a group twice"
        for name in names:
            if name in seen:
                yield f"group {name} is in batch {seen[name]} and in batch {step}"
            seen[name] = step
    for step in sorted(set(range(1, committed + 1)) - set(sealed)):
        yield f"step {step} is committed, but its batch is not in the ledger"
    folded = {int(step) for (step,) in db.execute("SELECT step FROM ended WHERE reason = ''")}
    for step in sorted(set(sealed) - folded):
        wanted = "consumed" if step <= committed else "batched"
        yield from _batch_groups(db, step, sealed[step], wanted)
    for pass_, prompt, step in db.execute(
        "SELECT pass, prompt, step FROM groups WHERE state IN ('batched', 'consumed')"
    ):
        if step is None or f"{pass_}/{prompt}" not in sealed.get(step, set()):
            yield f"group {pass_}/{prompt} counts as used by step {step}, whose batch does not name it"
    yield from _named(
        db, "FROM samples s JOIN groups g ON g.pass = s.pass AND g.prompt = s.prompt "
        "WHERE s.state IN ('batched', 'consumed') AND g.state != s.state",
        "used samples are in a group that is not",
    )  # fmt: skip


def _batch_groups(db: sqlite3.Connection, step: int, names: set[str], wanted: str) -> Iterator[str]:
    found: dict[str, str] = {
        f"{pass_}/{prompt}": state
        for pass_, prompt, state in db.execute("SELECT pass, prompt, state FROM groups WHERE step = ?", (step,))
    }
    for name in sorted(names):
        if found.get(name) != wanted:
            yield f"group {name} of batch {step} is {found.get(name, 'missing')}, not {wanted}"
    rest = db.execute(
        "SELECT s.state, COUNT(*) FROM samples s JOIN groups g ON g.pass = s.pass AND g.prompt = s.prompt "
        "WHERE g.step = ? AND s.state NOT IN (?, 'discarded') GROUP BY s.state", (step, wanted),
    )  # fmt: skip
    for state, number in rest:
        yield f"batch {step} is {wanted}, but {number} of its samples are {state}"


def _steps(db: sqlite3.Connection, committed: int) -> Iterator[str]:
    """Every committed step has one row, which counts the samples that the ledger says it consumed."""
    rows = {row.step: row for row in read_steps(db)}
    missing = sorted(set(range(1, committed + 1)) - set(rows))
    if missing:
        yield f"{len(missing)} committed steps have no row: {missing[:MAX_EXAMPLES]}"
    extra = sorted(set(rows) - set(range(1, committed + 1)))
    if extra:
        yield f"there are rows of steps that are not committed: {extra[:MAX_EXAMPLES]}"
    counted = {
        step: int(number)
        for step, number in db.execute(
            "SELECT g.step, COUNT(*) FROM samples s JOIN groups g ON g.pass = s.pass AND g.prompt = s.prompt "
            "WHERE s.state = 'consumed' GROUP BY g.step UNION ALL SELECT step, number FROM ended WHERE reason = ''"
        )
    }
    for step, row in rows.items():
        if counted.get(step, 0) != row.num_samples:
            yield f"step {step} trained on {row.num_samples} samples, {counted.get(step, 0)} rows say so"


def _lengths(db: sqlite3.Connection) -> Iterator[str]:
    """Where responses are kept, their segments are whole and as long as recorded."""
    stored = (
        "(SELECT COALESCE(SUM(LENGTH(t.tokens)), 0) FROM segments t WHERE t.pass = s.pass AND t.prompt = s.prompt "
        "AND t.idx = s.idx)"
    )
    ended = "s.state IN ('finished', 'graded', 'batched', 'consumed')"
    yield from _named(
        db, f"FROM samples s WHERE {ended} AND s.kept = 1 AND {stored} != 4 * s.length",
        "responses are not as long as recorded",
    )  # fmt: skip
    yield from _named(
        db, "FROM segments s WHERE LENGTH(s.tokens) != LENGTH(s.logprobs) OR s.start != (SELECT "
        "COALESCE(SUM(LENGTH(t.tokens)) / 4, 0) FROM segments t WHERE t.pass = s.pass AND t.prompt = s.prompt AND "
        "t.idx = s.idx AND t.start < s.start)",
        "segments do not join",
    )  # fmt: skip
    yield from _named(db, "FROM segments s WHERE s.crc != crc(s.tokens, s.logprobs)", "segments are not as written")


def _named(db: sqlite3.Connection, query: str, what: str) -> Iterator[str]:
    """A violation with the number of rows of `query` (from FROM on, samples as s) and some names."""
    number = int(db.execute(f"SELECT COUNT(*) {query}").fetchone()[0])
    if number:
        rows = db.execute(f"SELECT s.pass, s.prompt, s.idx {query} LIMIT {MAX_EXAMPLES}")
        names = ", ".join(f"{pass_}/{prompt}/{idx}" for pass_, prompt, idx in rows)
        yield f"{number} {what}: {names}{' ...' if number > MAX_EXAMPLES else ''}"
