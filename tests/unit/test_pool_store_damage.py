"""Files that a disk has damaged, and files of other releases: refused, or an earlier commit, never anything else."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from laminar.core.identity import GroupKey, SampleKey
from laminar.core.samples import Group, Holder, Sample, SampleState
from laminar.pool import rows
from laminar.pool.restore import Stored
from laminar.pool.store import Owner, SqliteStore, StoreError
from laminar.shell.audit import read_audit
from laminar.shell.ledger_file import FILE_NAME, SCHEMA_VERSION, open_ledger, read_meta
from laminar.shell.ledger_migrations import MIGRATIONS

OWNER = Owner("uid", 1)
OLD = Path(__file__).parents[1] / "data" / "ledger_v1"
COMMITS = 40


def load(folder: Path, owner: Owner = OWNER) -> Stored:
    async def read() -> Stored:
        store = SqliteStore(folder, owner)
        try:
            return await store.load()
        finally:
            store.close()

    return asyncio.run(read())


def state_after(commits: int) -> dict[int, bytes]:
    """Tokens of each prompt's only sample after so many commits: commit n appends to prompt n % 5."""
    tokens: dict[int, bytes] = {}
    for n in range(commits):
        tokens[n % 5] = tokens.get(n % 5, b"") + n.to_bytes(4, "little") * 50
    return tokens


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a store as its process left them in the middle: part of it in the file, the rest in the log."""
    live, copy = tmp_path_factory.mktemp("live"), tmp_path_factory.mktemp("copy") / "store"

    async def write() -> None:
        store = SqliteStore(live, OWNER)
        for n in range(COMMITS):
            sample = Sample(SampleKey(GroupKey(0, n % 5), 0), SampleState.LEASED, 1, Holder("rollout-0", 1), 0)
            start = 50 * (n // 5)
            part = rows.segments([(sample.key, start, n.to_bytes(4, "little") * 50, b"l" * 200)])
            group = rows.group(Group(sample.key.group, [sample]), "", "", 0)
            await store.submit([group, *rows.sample(sample), part, rows.meta("n", n + 1)])
            if n == COMMITS // 2:
                store.connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        shutil.copytree(live, copy)
        store.close()

    asyncio.run(write())
    assert (copy / f"{FILE_NAME}-wal").stat().st_size > 0
    return copy


def assert_one_commit(folder: Path) -> int:
    """Everything is as after some whole number of commits, which is returned; or it is refused: -1."""
    try:
        stored = load(folder)
    except StoreError:
        return -1
    commits = int(stored.meta.get("n", 0))
    found = {group.key.prompt: bytes(group.samples[0].tokens) for group in stored.groups}
    assert found == state_after(commits)
    return commits


def damaged(crashed: Path, tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    shutil.copytree(crashed, folder)
    return folder


def test_a_log_that_is_torn_anywhere_gives_an_earlier_commit(crashed: Path, tmp_path: Path) -> None:
    rng = random.Random(1)
    size = (crashed / f"{FILE_NAME}-wal").stat().st_size
    seen: set[int] = set()
    for turn in range(24):
        folder = damaged(crashed, tmp_path, f"torn-{turn}")
        log = folder / f"{FILE_NAME}-wal"
        at = size - 1 - rng.randrange(2 * 4096) if turn % 2 else rng.randrange(size)
        with log.open("r+b") as file:
            if turn % 3 == 0:
                file.truncate(at)
            else:
                file.seek(at)
                file.write(rng.randbytes(min(2048, size - at)))
        seen.add(assert_one_commit(folder))
    assert COMMITS not in seen or len(seen) > 1, "no damage had any effect"
    assert max(seen) < COMMITS or seen != {COMMITS}


def test_a_torn_page_of_the_file_under_a_log_that_still_has_it_changes_nothing(crashed: Path, tmp_path: Path) -> None:
    """As a power failure in the middle of moving the log into the file leaves it: the log is moved again."""
    folder = damaged(crashed, tmp_path, "moving")
    with sqlite3.connect(folder / FILE_NAME) as db:
        pages_in_log = (folder / f"{FILE_NAME}-wal").stat().st_size // 4120
        last = int(db.execute("PRAGMA page_count").fetchone()[0])
    db.close()
    assert pages_in_log > 0
    folder = damaged(crashed, tmp_path, "torn")
    file = folder / FILE_NAME
    with file.open("r+b") as stream:
        stream.seek(4096 * (last - 1) + 2048)
        stream.write(b"\xa5" * 2048)
    assert assert_one_commit(folder) == COMMITS


def test_a_file_whose_last_pages_are_torn_is_refused_or_whole(crashed: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(crashed, whole)
    assert assert_one_commit(whole) == COMMITS  # closed in order: all is in the file now
    size = (whole / FILE_NAME).stat().st_size
    rng = random.Random(2)
    outcomes: list[int] = []
    for turn in range(40):
        folder = damaged(whole, tmp_path, f"page-{turn}")
        page = size // 4096 - 1 - turn % 10
        with (folder / FILE_NAME).open("r+b") as file:
            if turn == 0:
                file.truncate(size - 4096)
            elif turn % 2:
                file.seek(4096 * page)
                file.write(rng.randbytes(4096))
            else:
                file.seek(4096 * page + 2048)
                file.write(rng.randbytes(2048))
        outcomes.append(assert_one_commit(folder))
    assert outcomes.count(-1) > len(outcomes) // 2, "most damage is found; the rest lies where nothing is kept"
    assert set(outcomes) <= {-1, COMMITS}


def test_a_single_wrong_byte_of_a_token_is_found(crashed: Path, tmp_path: Path) -> None:
    folder = damaged(crashed, tmp_path, "byte")
    with sqlite3.connect(folder / FILE_NAME) as db:
        db.execute("UPDATE segments SET tokens = CAST(X'ff' || SUBSTR(tokens, 2) AS BLOB) WHERE rowid = 7")
    db.close()
    with pytest.raises(StoreError, match="is not what was written"):
        load(folder)


# --- other releases ---------------------------------------------------------------------------------------------


def test_every_schema_that_was_ever_written_has_a_file_and_a_way_to_the_present_one() -> None:
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA_VERSION))
    assert all((OLD.parent / f"ledger_v{version}" / FILE_NAME).is_file() for version in MIGRATIONS)


def test_an_old_ledger_is_migrated_whole_and_reads_as_before(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "store")
    before = read_audit(tmp_path / "store")
    assert before.violations == []
    with sqlite3.connect(OLD / FILE_NAME) as db:
        old = db.execute(
            "SELECT pass, prompt, idx, start, tokens, logprobs FROM segments ORDER BY 1, 2, 3, 4"
        ).fetchall()
    db.close()
    stored = load(tmp_path / "store", Owner("uid-1", 1))
    assert stored.committed_step == 2
    assert sorted(str(group.key) for group in stored.groups) == ["0/5", "0/8"]
    assert read_audit(tmp_path / "store") == before
    with open_ledger(tmp_path / "store") as db:
        new = db.execute(
            "SELECT pass, prompt, idx, start, tokens, logprobs FROM segments ORDER BY 1, 2, 3, 4"
        ).fetchall()
        assert read_meta(db)["schema"] == str(SCHEMA_VERSION)
    assert [tuple(row) for row in new] == old


def test_a_migrated_file_has_the_tables_of_a_new_one(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "old")
    load(tmp_path / "old", Owner("uid-1", 1))
    load(tmp_path / "new", Owner("uid-1", 1))

    def shape(folder: Path) -> dict[str, list]:
        with open_ledger(folder) as db:
            tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1")]
            columns = {t: [tuple(c)[1:4] for c in db.execute(f"PRAGMA table_info({t})")] for t in tables}
            indexes = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'index' ORDER BY 1")]
            return columns | {"indexes": [name for name in indexes if not name.startswith("sqlite_")]}

    assert shape(tmp_path / "old") == shape(tmp_path / "new")


def test_reading_an_old_ledger_changes_nothing_of_it(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "store")
    before = (tmp_path / "store" / FILE_NAME).read_bytes()
    assert read_audit(tmp_path / "store").ok
    assert (tmp_path / "store" / FILE_NAME).read_bytes() == before
    assert [file.name for file in (tmp_path / "store").iterdir()] == [FILE_NAME]


def test_a_newer_ledger_is_refused_in_one_paragraph_and_left_as_it_is(tmp_path: Path) -> None:
    load(tmp_path)
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    db.close()
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(StoreError, match="a newer release wrote it. Nothing was changed") as refused:
        load(tmp_path)
    assert "\n" not in str(refused.value)
    assert (tmp_path / FILE_NAME).read_bytes() == before
