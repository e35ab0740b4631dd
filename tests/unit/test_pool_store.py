"""The store: order, durability through kill -9, refusals, and a full queue that loses nothing."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.core.decisions import Counters
from laminar.core.identity import GroupKey, SampleKey
from laminar.core.prompts import StreamPosition
from laminar.core.samples import Group, GroupState, Holder, Sample, SampleState, SealedBatch
from laminar.pool import rows
from laminar.pool.restore import consumed_after, counters_of, read_all
from laminar.pool.store import Owner, SqliteStore, StoreError, StoreUnavailable
from laminar.shell.audit import read_audit
from laminar.shell.ledger_file import FILE_NAME, LedgerFileError, open_ledger, read_loads, read_meta, read_samples
from laminar.wire.messages import EngineLoad

WRITER = """
import asyncio, sys
from pathlib import Path
from laminar.core.identity import GroupKey, SampleKey
from laminar.pool import rows
from laminar.pool.store import Owner, SqliteStore

async def main():
    store = SqliteStore(Path(sys.argv[1]), Owner("uid", 1))
    for offset in range(100_000):
        key = SampleKey(GroupKey(0, offset % 7), 0)
        await store.submit([rows.segments([(key, offset, offset.to_bytes(4, "little"), b"lllo")])])
        print(offset, flush=True)

asyncio.run(main())
"""


def a_group(prompt: int, state: GroupState = GroupState.OPEN, step: int | None = None) -> Group:
    key = GroupKey(0, prompt)
    sample_state = SampleState.CONSUMED if state is GroupState.CONSUMED else SampleState.LEASED
    samples = [
        Sample(SampleKey(key, i), sample_state, term=2, holder=Holder("rollout-0", 3), version=1) for i in (0, 1)
    ]
    return Group(key, samples, state, 4, step)


def ops_of(group: Group, tokens: bytes = b"abcd") -> list[rows.Op]:
    ops: list[rows.Op] = [rows.group(group, "text", "answer", 0)]
    for sample in group.samples:
        ops += [*rows.sample(sample), rows.segments([(sample.key, 0, tokens, b"l" * len(tokens))])]
    return ops


def totals(counters: Counters | None = None, committed_step: int = 0) -> list[rows.Op]:
    return [*rows.totals(counters or Counters(), StreamPosition(), committed_step)]


def test_every_acknowledged_append_survives_kill_9_in_the_middle(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = [int(process.stdout.readline()) for _ in range(300)]
    process.kill()
    rest = [int(line) for line in process.stdout.read().splitlines()]
    process.stdout.close()
    process.wait()
    expected = len(acknowledged + rest)
    with open_ledger(tmp_path) as db:
        stored = {row[0]: bytes(row[1]) for row in db.execute("SELECT start, tokens FROM segments")}
    assert all(stored[offset] == offset.to_bytes(4, "little") for offset in range(expected))


def test_what_is_stored_comes_back_as_it_was(tmp_path: Path) -> None:
    counters = Counters(admitted=4, consumed=2, restarted_tokens=7)
    counters.discarded["tooLong"] = 1
    counters.refused["gap"] = 3
    group = a_group(5)
    more = [rows.segments([(group.samples[0].key, 1, b"efgh", b"llll")]), rows.cleared(group.samples[1].key)]
    submit(tmp_path, *ops_of(group), *rows.totals(counters, StreamPosition(1, 2), 3), *more)
    with open_ledger(tmp_path) as db:
        stored = read_all(db)
    (found,) = stored.groups
    assert (found.key, found.state, found.ready_seq) == (group.key, group.state, 4)
    assert [bytes(s.tokens) for s in found.samples] == [b"abcdefgh", b""]
    assert found.samples[0].holder == Holder("rollout-0", 3)
    assert (stored.counters, stored.position, stored.committed_step) == (counters, StreamPosition(1, 2), 3)


def submit(folder: Path, *ops: rows.Op) -> None:
    async def write() -> None:
        store = SqliteStore(folder, Owner("uid", 1))
        await store.submit(ops)
        store.close()

    asyncio.run(write())


def test_consumed_batches_come_back_in_their_sealed_order(tmp_path: Path) -> None:
    groups = [a_group(prompt, GroupState.CONSUMED, step=1 + prompt // 2) for prompt in range(4)]
    batches = [SealedBatch(1, (groups[1].key, groups[0].key)), SealedBatch(2, (groups[3].key, groups[2].key))]
    submit(tmp_path, *[op for g in groups for op in ops_of(g)], *[rows.batch(b, 0.0) for b in batches])
    with open_ledger(tmp_path) as db:
        ((batch, found),) = consumed_after(db, 1)
    assert (batch, [g.key for g in found]) == (batches[1], [groups[3].key, groups[2].key])


def test_a_pruned_step_keeps_its_rows_and_loses_its_tokens(tmp_path: Path) -> None:
    submit(tmp_path, *ops_of(a_group(1, GroupState.CONSUMED, step=4)), rows.PruneStep(4))
    with open_ledger(tmp_path) as db:
        assert [sample.tokens for sample in read_samples(db, step=4, with_tokens=True)] == [None, None]


def test_a_sample_keeps_the_name_of_the_replica_that_wrote_it(tmp_path: Path) -> None:
    group = a_group(1)
    before = ops_of(group)
    for sample in group.samples:
        sample.holder, sample.state = None, SampleState.GRADED
    submit(tmp_path, *before, *[op for sample in group.samples for op in rows.sample(sample)])
    with open_ledger(tmp_path) as db:
        assert [sample.slot for sample in read_samples(db)] == ["rollout-0", "rollout-0"]
        assert read_all(db).groups[0].samples[0].holder is None


def test_halved_load_curves_keep_every_second_point_of_each_replica(tmp_path: Path) -> None:
    loads = [rows.load(i, float(i), f"rollout-{i % 2}", 0, EngineLoad(running=i)) for i in range(1, 9)]
    submit(tmp_path, *loads, rows.HalveLoads())
    with open_ledger(tmp_path) as db:
        assert [(point.slot, point.load.running) for point in read_loads(db)] == [
            ("rollout-1", 1), ("rollout-0", 2), ("rollout-1", 5), ("rollout-0", 6),
        ]  # fmt: skip


def test_another_jobs_ledger_a_newer_schema_and_a_second_writer_are_refused(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path, Owner("uid", 1))
    with pytest.raises(StoreUnavailable, match="another pool process"):
        SqliteStore(tmp_path, Owner("uid", 1))
    store.close()
    with pytest.raises(StoreError, match="belongs to job uid, not to other"):
        SqliteStore(tmp_path, Owner("other", 1))
    with pytest.raises(StoreError, match="is of generation 1"):
        SqliteStore(tmp_path, Owner("uid", 0))
    submit(tmp_path, rows.meta("schema", 99))
    with pytest.raises(StoreError, match="schema 99"):
        SqliteStore(tmp_path, Owner("uid", 1))
    with pytest.raises(LedgerFileError, match="schema 99"), open_ledger(tmp_path):
        pass


def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerFileError, match="there is no ledger"), open_ledger(tmp_path):
        pass
    (tmp_path / FILE_NAME).write_text("not a database, but long enough to be taken for one " * 20)
    with pytest.raises(LedgerFileError, match="cannot be read as a ledger"), open_ledger(tmp_path):
        pass
    with pytest.raises(StoreError, match="is damaged") as refused:
        SqliteStore(tmp_path, Owner("uid", 1))
    assert not isinstance(refused.value, StoreUnavailable), "waiting does not help"


def test_a_ledger_that_its_writer_left_in_the_middle_is_read_whole_and_untouched(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "live", Owner("uid", 1))
    asyncio.run(_write_and_copy(store, tmp_path))
    store.close()
    with open_ledger(tmp_path / "copy") as db:
        assert read_meta(db)["hello"] == "world", "its log counts"


async def _write_and_copy(store: SqliteStore, tmp_path: Path) -> None:
    await store.submit([rows.meta("hello", "world")])
    shutil.copytree(tmp_path / "live", tmp_path / "copy")


def test_an_error_of_a_query_reaches_its_caller(tmp_path: Path) -> None:
    async def read() -> None:
        store = SqliteStore(tmp_path, Owner("uid", 1))
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            await store._read(lambda db: db.execute("SELECT * FROM absent"))

    asyncio.run(read())


def test_the_audit_finds_what_was_lost_and_what_was_used_twice(tmp_path: Path) -> None:
    lost, twice = a_group(1, GroupState.CONSUMED, step=1), a_group(2, GroupState.CONSUMED, step=1)
    for sample in lost.samples + twice.samples:
        sample.tokens, sample.holder = bytearray(b"abcd"), None
    batches = [SealedBatch(1, (lost.key, twice.key)), SealedBatch(2, (twice.key,))]
    all_ = [op for group in (lost, twice) for op in ops_of(group)]
    gone = rows.Delete("samples", (0, 1, 1))
    short = rows.cleared(twice.samples[0].key)
    counted = totals(Counters(admitted=4, consumed=4), committed_step=2)
    submit(tmp_path, *all_, *[rows.batch(b, 0.0) for b in batches], gone, short, *counted)
    report = read_audit(tmp_path)
    text = "\n".join(report.violations)
    for words in [
        "4 samples were admitted, 3 have a row",
        "the equation does not hold: 4 admitted != 3 consumed + 0 discarded + 0 open",
        "group 0/2 is in batch 1 and in batch 2",
        "3 used samples come from a version that never became visible",
        "2 committed steps have no row",
        "1 responses are not as long as recorded: 0/2/0",
    ]:
        assert words in text, text
    assert not report.ok


def test_totals_are_written_and_read_the_same() -> None:
    counters = Counters(admitted=3, moved_samples=2)
    counters.discarded["failed"] = 1
    assert counters_of(rows.counters_json(counters)) == counters
