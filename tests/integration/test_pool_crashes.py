"""kill -9 of the pool at every arrow of the sample table, and at every table of the ledger that gets rows."""

from __future__ import annotations

import http.client
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from test_pool_job import Actors, CommandStream, PoolProcess, append, grade, response

from laminar.core.samples import TRANSITIONS
from laminar.shell.calls import Refused
from laminar.wire.dataplane import CommandKind, FinishItem, GradeItem, LeaseKind, SampleGrant
from laminar.wire.messages import Ack, Fence, TakeStatus

CRASHING = Path(__file__).with_name("crashing_pool.py")
MOMENTS = ("decided", "written", "committed")
TABLES = ("meta", "members", "versions", "groups", "samples", "batches", "steps", "checkpoints", "rounds",
          "eval_samples", "events")  # fmt: skip
STEPS = 14
LIMIT_S = 360.0


class Resurrected:
    """Starts the pool again as soon as it is dead."""

    def __init__(self, root: Path) -> None:
        self.reached = root / "crashes"
        self.reached.touch()
        self.pool = PoolProcess(root, spec={"steps": STEPS})
        self.pool.program = [str(CRASHING)]
        self.pool.more_env = {"CRASHES": str(self.reached)}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.pool.start()
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.is_set():
            assert self.pool.process is not None
            try:
                self.pool.process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
            if not self._over.is_set():
                self.pool.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.pool.close()


class Fleet(Actors):
    """Two replicas that fail in every way that the ledger knows."""

    def __init__(self, pool: PoolProcess) -> None:
        super().__init__(pool)
        self.streams: dict[str, CommandStream] = {}

    def connect(self, slot: str) -> None:
        self.disconnect(slot)
        deadline_s = time.monotonic() + 30
        while slot not in self.streams:
            assert time.monotonic() < deadline_s
            try:
                self.streams[slot] = CommandStream(self.pool, self, slot)
            except (OSError, http.client.HTTPException, msgspec.DecodeError, AssertionError):
                continue  # it restarts

    def disconnect(self, slot: str) -> None:
        if slot in self.streams:
            self.streams.pop(slot).close()

    def fence(self, slot: str) -> None:
        self.disconnect(slot)
        self.post("/fence", Fence(slot=slot, incarnation=self.incarnations[slot], reason="test"), Ack)
        self.join(slot)

    def work(self, slot: str) -> list[SampleGrant]:
        """What it is granted, half written."""
        reply = self.lease(slot)
        samples = [sample for group in reply.groups for sample in group.samples]
        running = [sample for sample in samples if not sample.finish_reason]
        if running:
            self.say(slot, appends=[append(sample, 0) for sample in running])
        return samples if reply.kind is LeaseKind.GRANT else []

    def end(self, slot: str, samples: list[SampleGrant]) -> None:
        running = [sample for sample in samples if not sample.finish_reason]
        self.say(slot, appends=[append(sample, 1) for sample in running])
        self.say(slot, finishes=[self.finished(sample) for sample in running])

    def finished(self, sample: SampleGrant, reason: str = "stop") -> FinishItem:
        return FinishItem(id=sample.id, term=sample.term, length=len(response(sample)), reason=reason)

    def obey(self, slot: str) -> None:
        """What commands have given to it meanwhile comes to its end. A pool that dies says nothing more."""
        self.connect(slot)
        samples: list[SampleGrant] = []
        pings = 0
        try:
            while pings < 2:
                command = self.streams[slot].read()
                pings += command.kind is CommandKind.PING
                if command.kind is CommandKind.ADOPT:
                    samples += [sample for group in command.groups for sample in group.samples]
        except (OSError, http.client.HTTPException, msgspec.DecodeError):
            pass
        self.end(slot, samples)
        self.say(slot, grades=[grade(sample) for sample in samples])

    # --- ways to fail -------------------------------------------------------------------------------------------

    def running_moves_or_is_parked(self, *, other: bool) -> None:
        self.work("rollout-0")
        self.work("rollout-1")
        if other:
            self.connect("rollout-1")
        self.fence("rollout-0")

    def graded_elsewhere(self, *, other: bool) -> None:
        self.end("rollout-0", self.work("rollout-0"))
        if other:
            self.connect("rollout-1")
        else:
            self.disconnect("rollout-1")
        self.fence("rollout-0")

    def nothing_written(self) -> None:
        self.lease("rollout-0")
        self.join("rollout-0")

    def engine_errors(self) -> None:
        for _ in range(3):
            for sample in self.work("rollout-0")[:1]:
                self.say("rollout-0", finishes=[self.finished(sample, "error")])

    def grader_fails(self) -> None:
        samples = self.work("rollout-0")
        self.end("rollout-0", samples)
        bad = [GradeItem(id=sample.id, term=sample.term, status="ungraded") for sample in samples[:1]]
        self.say("rollout-0", grades=[*map(grade, samples[1:2]), *bad])

    def poison(self) -> None:
        """It is suspect first, and known to be dead later: its samples wait for another replica meanwhile."""
        for _ in range(2):
            self.work("rollout-0")
            self.connect("rollout-0")
            self.disconnect("rollout-0")
            deadline_s = time.monotonic() + 5
            while not any(m.suspect for m in self.status().members if m.slot == "rollout-0"):
                if time.monotonic() > deadline_s:
                    break  # the pool died meanwhile and grants everybody a silent period
            self.fence("rollout-0")

    def kept_version_is_gone(self) -> None:
        self.work("rollout-0")
        self.fence("rollout-0")
        self.publish(self.status().committed_step, self.version)
        self.beat("relay-0")

    def roll_back(self) -> None:
        kept = [info.step for info in self.status().checkpoints]
        if kept:
            self.begin(self.attempt + 1, restored_step=kept[0])

    def step(self) -> None:
        step = self.status().committed_step + 1
        if step > STEPS:
            return
        deadline_s = time.monotonic() + 90
        rounds = 0
        while self.take(step).status is not TakeStatus.BATCH:
            assert time.monotonic() < deadline_s, self.status()
            rounds += 1
            if rounds % 4 == 0:
                self.obey("rollout-0")
                self.obey("rollout-1")
            for slot in ("rollout-0", "rollout-1"):
                samples = self.work(slot)
                self.end(slot, samples)
                self.say(slot, grades=[grade(sample) for sample in samples])
        self.batch(step)
        self.commit(step)
        self.publish(step, self.version)
        self.checkpoint(step)


@pytest.fixture
def resurrected(tmp_path: Path) -> Iterator[Resurrected]:
    pool = Resurrected(tmp_path)
    yield pool
    pool.close()


@pytest.mark.slow
@pytest.mark.timeout(560)
def test_a_pool_that_is_killed_at_every_arrow_and_every_table_loses_nothing(resurrected: Resurrected) -> None:
    fleet = Fleet(resurrected.pool)
    fleet.start()
    while fleet.status().phase == "evaluatingFirst":
        fleet.generate("rollout-0")
    faults = [
        lambda: fleet.running_moves_or_is_parked(other=True),
        lambda: fleet.running_moves_or_is_parked(other=False),
        lambda: fleet.graded_elsewhere(other=True),
        lambda: fleet.graded_elsewhere(other=False),
        fleet.nothing_written,
        fleet.engine_errors,
        fleet.grader_fails,
        lambda: fleet.running_moves_or_is_parked(other=True),
        fleet.poison,
        fleet.kept_version_is_gone,
        fleet.roll_back,
    ]
    wanted = {f"{state.value} {event.value} {m}" for state, event in TRANSITIONS for m in MOMENTS}
    wanted |= {f"{table} {moment}" for table in TABLES for moment in MOMENTS}
    deadline_s = time.monotonic() + LIMIT_S
    turn = 0
    while wanted - set(resurrected.reached.read_text().splitlines()) and fleet.status().committed_step < STEPS - 1:
        assert time.monotonic() < deadline_s
        try:
            faults[turn % len(faults)]()
        except Refused as error:
            assert error.status in (404, 409, 410), error  # a life that the fault has ended
            fleet.join("rollout-0")
        turn += 1
        if turn % 3 == 0:
            fleet.step()
    while fleet.status().committed_step < STEPS:
        fleet.step()
    status = fleet.finish()
    for slot in list(fleet.streams):
        fleet.disconnect(slot)
    assert status.counts.open == 0
    report = resurrected.pool.audit()
    assert report.violations == []
    assert sorted(wanted - set(resurrected.reached.read_text().splitlines())) == []
