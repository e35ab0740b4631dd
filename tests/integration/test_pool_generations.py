"""A pool that loses its store: the next generation goes on from the ledger beside the newest checkpoint."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_pool_job import (
    PROMPTS,
    SAMPLES,
    STEPS,
    TOKEN,
    UID,
    Actors,
    PoolProcess,
    append,
)

from laminar.shell.audit import read_audit
from laminar.shell.calls import OldGeneration, Unreachable
from laminar.shell.client import PoolClient
from laminar.shell.ledger_file import open_ledger, read_events, read_versions
from laminar.shell.member import Member
from laminar.wire.messages import Heartbeat, HeartbeatReply, MemberState, Register, Role, TakeStatus


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PoolProcess]:
    process = PoolProcess(tmp_path)
    process.start()
    yield process
    process.close()


def save(actors: Actors, step: int) -> Path:
    """A sealed checkpoint as the trainer makes it: only the ledger is real."""
    params = {"attempt": actors.attempt, "step": step}
    snapshot = actors.client.get_bytes("/v1/trainer/ledger", 15.0, deadline_s=30.0, params=params)
    folder = actors.pool.root / "checkpoints" / f"step-{step}-attempt-{actors.attempt}"
    folder.mkdir(parents=True)
    (folder / "ledger.sqlite").write_bytes(snapshot)
    (folder / "manifest.json").write_text(json.dumps({"ledger.sqlite": "hash"}))
    return folder


def lose_store(pool: PoolProcess, checkpoint: Path | None) -> None:
    pool.kill()
    shutil.rmtree(pool.store)
    pool.generation += 1
    pool.checkpoint = checkpoint
    pool.start()


def test_a_new_generation_goes_on_from_a_checkpoints_ledger_and_counts_nothing_twice(pool: PoolProcess) -> None:
    old = Actors(pool)
    old.start()
    first = old.train(last=1)
    # Step 2 is sealed and step 1 saved while responses are half written.
    while old.take(2).status is not TakeStatus.BATCH:
        old.generate("rollout-0")
    second = old.batch(2)
    held = [sample for group in old.lease("rollout-1").groups for sample in group.samples]
    old.say("rollout-1", appends=[append(sample, 0) for sample in held])
    checkpoint = save(old, 1)
    assert read_audit(checkpoint / "ledger.sqlite").violations == [], "the snapshot proves itself"
    old.commit(2)  # after the snapshot: the new generation trains it again, on the same batch
    old.publish(2, old.version)
    lost_version = old.version

    lose_store(pool, checkpoint)
    with pytest.raises(OldGeneration) as refused:
        old.beat("rollout-0")
    assert refused.value.current == 2
    new = Actors(pool)
    status = new.status()
    assert (status.generation, status.committed_step) == (2, 1)
    new.incarnations = dict(old.incarnations)
    for slot, role in (("relay-0", Role.RELAY), ("rollout-0", Role.ROLLOUT), ("rollout-1", Role.ROLLOUT)):
        assert new.join(slot, role) > 1000 > old.incarnations[slot], "no incarnation is issued twice"
    new.chain(epoch=2)
    reply = new.begin(2, restored_step=1)
    assert reply.restored_version is not None and reply.restored_version < lost_version
    assert new.version == 10_000, "no version is issued twice"
    assert new.take(2).status is TakeStatus.BATCH
    assert new.batch(2) == second
    rest = new.train()
    status = new.finish()
    assert status.counts.consumed == STEPS * PROMPTS * SAMPLES
    used = [*first[1], *second, *(id_ for step, ids in rest.items() if step > 2 for id_ in ids)]
    assert len(used) == len(set(used)) == status.counts.consumed
    assert status.counts.restarted_tokens == 3 * len(held)
    report = pool.audit()
    assert report.violations == []
    assert report.open == 0
    with open_ledger(pool.store) as db:
        assert any("generation 2" in event.text for event in read_events(db))
        assert [row.version for row in read_versions(db)][-1] > 10_000


def test_a_generation_without_a_checkpoint_begins_the_job_anew(pool: PoolProcess) -> None:
    Actors(pool).start()
    lose_store(pool, None)
    actors = Actors(pool)
    actors.start()
    assert actors.version == 10_000
    actors.train()
    actors.finish()
    assert pool.audit().violations == []


def test_an_older_ledger_that_comes_back_and_a_foreign_snapshot_are_refused(pool: PoolProcess) -> None:
    actors = Actors(pool)
    actors.start()
    actors.train(last=1)
    checkpoint = save(actors, 1)
    pool.kill()
    pool.generation = 2
    pool.start()
    assert pool.process is not None
    assert pool.process.wait(timeout=30) == 2
    assert "generation 2 has taken the job over" in (pool.root / "pool.log").read_text()
    with (checkpoint / "ledger.sqlite").open("r+b") as file:
        file.seek(-200, 2)
        file.write(b"\xff" * 200)
    shutil.rmtree(pool.store)
    pool.checkpoint = checkpoint
    pool.start()
    assert pool.process.wait(timeout=30) in (1, 2)
    assert not (pool.store / "ledger.sqlite").exists(), "a damaged snapshot begins nothing"


def test_members_follow_a_newer_generation_and_wait_for_an_older_one_to_end(pool: PoolProcess) -> None:
    Actors(pool).start()

    async def follow() -> None:
        async with PoolClient(f"http://{pool.address}", TOKEN, UID, 1, "relay-0") as client:
            member = Member(client, Register(slot="relay-1", role=Role.RELAY, index=1, life=1, nonce=""))
            await member.join(deadline_s=30)
            await asyncio.to_thread(lose_store, pool, None)
            beat = Heartbeat(slot="relay-1", incarnation=member.incarnation, state=MemberState.RUNNING)
            with pytest.raises(OldGeneration):
                await client.post_json("/v1/heartbeat", beat, HeartbeatReply, deadline_s=30)
            assert await member.join(deadline_s=30) > 1000
            assert client.generation == 2
            client.generation = 3  # as if a third had been heard of
            with pytest.raises(Unreachable, match="this is generation 2"):
                await client.post_json("/v1/heartbeat", beat, HeartbeatReply, deadline_s=0.5)
            client.generation = 1
            trainer = Member(
                client, Register(slot="trainer-0", role=Role.TRAINER, index=0, life=1, nonce="", attempt=1)
            )
            with pytest.raises(OldGeneration):
                await trainer.join(deadline_s=30)

    asyncio.run(follow())
