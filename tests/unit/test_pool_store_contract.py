"""What every store of the pool promises. Another kind of store runs the same tests: add it to `KINDS`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from laminar.core.identity import GroupKey, SampleKey
from laminar.core.ledger import Counters
from laminar.core.prompts import StreamPosition
from laminar.core.samples import DiscardReason, Group, GroupState, Holder, Sample, SampleState, SealedBatch
from laminar.pool import rows
from laminar.pool.rows import Op
from laminar.pool.store import Owner, SqliteStore, Store, StoreError, StoreUnavailable

Open = Callable[[Path, Owner], Store]
KINDS: dict[str, Open] = {"sqlite": SqliteStore}
OWNER = Owner("uid", 1)


@pytest.fixture(params=KINDS)
def opened(request: pytest.FixtureRequest) -> Open:
    return KINDS[request.param]


def use(open_: Open, folder: Path, act: Callable[[Store], Awaitable[None]]) -> None:
    """One life of a store."""

    async def live() -> None:
        store = open_(folder, OWNER)
        try:
            await act(store)
        finally:
            store.close()

    asyncio.run(live())


def a_group(prompt: int, state: GroupState = GroupState.OPEN, step: int | None = None) -> Group:
    key = GroupKey(0, prompt)
    inner = {
        GroupState.OPEN: SampleState.LEASED,
        GroupState.CONSUMED: SampleState.CONSUMED,
        GroupState.DISCARDED: SampleState.DISCARDED,
    }[state]
    samples = [Sample(SampleKey(key, i), inner, term=2, holder=Holder("rollout-0", 3), version=1) for i in (0, 1)]
    for sample in samples:
        if state is GroupState.DISCARDED:
            sample.reason, sample.holder = DiscardReason.FAILED, None
    return Group(key, samples, state, 4, step)


def ops_of(group: Group, tokens: bytes = b"abcd", committed_step: int = 0) -> list[Op]:
    ops: list[Op] = [rows.group(group, "text", "answer", committed_step)]
    for sample in group.samples:
        ops += rows.sample(sample)
    return [*ops, rows.segments([(sample.key, 0, tokens, b"l" * len(tokens)) for sample in group.samples])]


def totals(committed_step: int = 0) -> list[Op]:
    return [*rows.totals(Counters(), StreamPosition(), committed_step)]


def test_what_was_submitted_is_there_for_the_next_life(opened: Open, tmp_path: Path) -> None:
    async def write(store: Store) -> None:
        group = a_group(5)
        await store.submit([*ops_of(group), *totals()])
        await store.submit([rows.segments([(group.samples[0].key, 1, b"efgh", b"llll")])])
        await store.submit([rows.cleared(group.samples[1].key)])

    async def read(store: Store) -> None:
        (group,) = (await store.load()).groups
        assert [bytes(sample.tokens) for sample in group.samples] == [b"abcdefgh", b""]
        assert group.samples[0].holder == Holder("rollout-0", 3)

    use(opened, tmp_path, write)
    use(opened, tmp_path, read)


def test_a_read_sees_everything_submitted_before_it_and_rows_keep_their_order(opened: Open, tmp_path: Path) -> None:
    async def act(store: Store) -> None:
        futures = [store.submit([rows.meta("n", number)]) for number in range(300)]
        assert (await store.load()).meta["n"] == "299"
        assert all(future.done() for future in futures)

    use(opened, tmp_path, act)


def test_thousands_of_appends_in_one_submit_come_back_each_in_its_place(opened: Open, tmp_path: Path) -> None:
    """More rows than one statement takes, and no multiple of it."""
    group = a_group(1)
    key = group.samples[0].key

    async def act(store: Store) -> None:
        await store.submit(
            [rows.group(group, "", "", 0), *rows.sample(group.samples[0]), *rows.sample(group.samples[1])]
        )
        parts = [(key, n, n.to_bytes(4, "little"), b"llll") for n in range(1003)]
        await store.submit([rows.segments(reversed(parts))])
        (found,) = (await store.load()).groups
        assert bytes(found.samples[0].tokens) == b"".join(part[2] for part in parts)

    use(opened, tmp_path, act)


def test_consumed_batches_after_a_step_come_back_in_their_sealed_order(opened: Open, tmp_path: Path) -> None:
    groups = [a_group(prompt, GroupState.CONSUMED, step=1 + prompt // 2) for prompt in range(4)]
    batches = [SealedBatch(1, (groups[1].key, groups[0].key)), SealedBatch(2, (groups[3].key, groups[2].key))]

    async def act(store: Store) -> None:
        await store.submit([op for g in groups for op in ops_of(g)] + [rows.batch(b, 0.0) for b in batches])
        ((batch, found),) = await store.consumed_after(1)
        assert (batch, [group.key for group in found]) == (batches[1], [groups[3].key, groups[2].key])
        await store.submit([rows.PruneStep(2)])
        ((_, found),) = await store.consumed_after(1)
        assert all(not sample.tokens for group in found for sample in group.samples), "its tokens are pruned"

    use(opened, tmp_path, act)


def test_a_folded_step_and_what_was_discarded_before_it_have_left(opened: Open, tmp_path: Path) -> None:
    used, early = a_group(1, GroupState.CONSUMED, step=3), a_group(2, GroupState.DISCARDED)
    late, running = a_group(3, GroupState.DISCARDED), a_group(4)

    async def act(store: Store) -> None:
        all_ = [*ops_of(used), *ops_of(early, committed_step=2), *ops_of(late, committed_step=3), *ops_of(running)]
        await store.submit([*all_, rows.batch(SealedBatch(3, (used.key,)), 0.0)])
        await store.submit([rows.FoldStep(3)])
        assert await store.consumed_after(0) == []
        assert [group.key for group in (await store.load()).groups] == [running.key]
        await store.submit([rows.FoldStep(3)])  # once more changes nothing

    use(opened, tmp_path, act)


def test_only_one_life_writes_and_only_its_owner_opens_it(opened: Open, tmp_path: Path) -> None:
    async def act(store: Store) -> None:
        await store.submit(totals())
        with pytest.raises(StoreUnavailable):
            opened(tmp_path, OWNER)

    use(opened, tmp_path, act)
    for other in (Owner("other", 1), Owner("uid", 0), Owner("uid", 2)):
        with pytest.raises(StoreError):
            opened(tmp_path, other)


def test_a_snapshot_has_what_is_open_and_the_batches_after_its_step(opened: Open, tmp_path: Path) -> None:
    groups = [a_group(prompt, GroupState.CONSUMED, step=prompt) for prompt in (1, 2)] + [a_group(3)]
    batches = [SealedBatch(step, (groups[step - 1].key,)) for step in (1, 2)]

    async def write(store: Store) -> None:
        all_ = [op for g in groups for op in ops_of(g)] + [rows.batch(b, 0.0) for b in batches]
        await store.submit([*all_, *totals(committed_step=2)])
        snapshot = await store.snapshot(1)
        (tmp_path / "copy").mkdir()
        (tmp_path / "copy" / "ledger.sqlite").write_bytes(snapshot)

    async def read(store: Store) -> None:
        stored = await store.load()
        assert (stored.committed_step, [g.key for g in stored.groups]) == (2, [groups[2].key])
        ((batch, found),) = await store.consumed_after(1)
        assert (batch, bytes(found[0].samples[0].tokens)) == (batches[1], b"abcd")
        assert await store.consumed_after(0) == [(batch, found)], "step 1 is in it by number only"

    use(opened, tmp_path / "store", write)
    use(SqliteStore, tmp_path / "copy", read)
