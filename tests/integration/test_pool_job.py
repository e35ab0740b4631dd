"""The pool as a real process over HTTP: scripted replicas, relays and a trainer, with and without kills."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from laminar.core.samples import ToolSpan
from laminar.shell.audit import AuditReport, read_audit
from laminar.shell.blocking import BlockingClient
from laminar.shell.calls import Conflict, Superseded
from laminar.shell.ledger_file import FILE_NAME, open_ledger, read_evaluations, read_samples, read_steps
from laminar.shell.settings import Common
from laminar.wire.codec import decode, pack_logprobs, pack_tokens
from laminar.wire.dataplane import (
    AppendItem,
    BatchSlice,
    Command,
    CommandKind,
    FinishItem,
    GradeItem,
    LeaseCall,
    LeaseKind,
    LeaseReply,
    Outcome,
    ProgressCall,
    ProgressReply,
    SampleGrant,
    SegmentKind,
)
from laminar.wire.messages import (
    Ack,
    BeginAttempt,
    BeginAttemptReply,
    ChainEpoch,
    ChainMember,
    CheckpointDurable,
    CheckpointDurableReply,
    CheckpointFailed,
    CheckpointInfo,
    CommitStep,
    Events,
    Fence,
    Heartbeat,
    HeartbeatReply,
    HeldVersion,
    JobStatus,
    MemberState,
    PublicationView,
    Register,
    Registered,
    ReservedVersion,
    ReserveVersion,
    ResumePoint,
    Role,
    StepRow,
    Steps,
    StopRequest,
    Take,
    TakeReply,
    TakeStatus,
    VersionComplete,
)

MODEL = Path(__file__).parents[1] / "data" / "grpo_reference" / "reference_model"
TOKEN, UID = "secret", "uid-1"
STEPS, PROMPTS, SAMPLES = 3, 2, 2


class PoolProcess:
    """The pool with an inherited listening socket, as the driver starts it: callers queue while it restarts."""

    def __init__(self, root: Path, spec: dict | None = None, store: Path | None = None) -> None:
        self.root, self.store = root, store or root / "store"
        self.sock = socket.socket()
        self.sock.bind(("127.0.0.1", 0))
        self.sock.listen(128)
        self.address = f"127.0.0.1:{self.sock.getsockname()[1]}"
        self.life = 0
        self.generation = 1
        self.checkpoint: Path | None = None
        """What a new generation begins from."""
        self.program = ["-m", "laminar.pool"]
        self.more_env: dict[str, str] = {}
        self.clients: list[BlockingClient] = []
        self.process: subprocess.Popen[bytes] | None = None
        rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(20)]
        (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (root / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
        (root / "job.json").write_text(json.dumps(job(root) | {"spec": job(root)["spec"] | (spec or {})}))

    def start(self) -> None:
        self.life += 1
        common = Common(
            job="toy", job_uid=UID, token=TOKEN, spec_path=self.root / "job.json", generation=self.generation,
            pool_url=f"http://{self.address}", slot="pool-0", life=self.life, listen=f"fd:{self.sock.fileno()}",
            dir=self.root,
        )  # fmt: skip
        env = os.environ | common.to_env() | {"LAMINAR_STORE": str(self.store), "OMP_NUM_THREADS": "1"}
        env |= self.more_env | ({"LAMINAR_CHECKPOINT": str(self.checkpoint)} if self.checkpoint else {})
        with (self.root / "pool.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.program], env=env, stderr=log, pass_fds=[self.sock.fileno()]
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout=20)

    def client(self, name: str) -> BlockingClient:
        self.clients.append(BlockingClient(f"http://{self.address}", TOKEN, UID, self.generation, name))
        return self.clients[-1]

    def close(self) -> None:
        self.kill()
        for client in self.clients:
            client.close()
        self.sock.close()

    def audit(self) -> AuditReport:
        return read_audit(self.store)


def job(root: Path) -> dict:
    return {
        "metadata": {"name": "toy"},
        "spec": {
            "steps": STEPS,
            "model": {"source": f"file:{MODEL}"},
            "data": {"train": {"source": f"file:{root}/data.jsonl"}},
            "evaluations": [{"name": "heldout", "source": f"file:{root}/eval.jsonl"}],
            "rewards": [{"name": "right", "type": "exact"}],
            "algorithm": {"promptsPerStep": PROMPTS, "samplesPerPrompt": SAMPLES},
            "trainer": {"checkpoint": {"everySteps": 1, "keep": 2}},
            "rollout": {"replicas": 2, "engine": {"type": "torch", "maxRunning": 8}},
        },
    }


class Actors:
    """Two replicas, one relay and a trainer, played in turns by one thread. `before` is called before each call."""

    def __init__(self, pool: PoolProcess, before: Callable[[], None] = lambda: None) -> None:
        self.pool, self.client, self.before = pool, pool.client("actors"), before
        self.incarnations: dict[str, int] = {}
        self.versions: dict[str, int | None] = {}
        self.attempt, self.version, self.nonces = 0, 0, 0

    def post(self, path: str, body, reply):
        self.before()
        return self.client.post_json(f"/v1{path}", body, reply, 15.0, deadline_s=60.0)

    def pack(self, path: str, body, reply):
        self.before()
        return self.client.post_msgpack(f"/v1{path}", body, reply, 15.0, deadline_s=60.0)

    def get(self, path: str, reply, **params):
        self.before()
        return self.client.get_json(f"/v1{path}", reply, 15.0, deadline_s=60.0, params=params)

    def status(self) -> JobStatus:
        return self.get("/status", JobStatus)

    def join(self, slot: str, role: Role = Role.ROLLOUT, **more) -> int:
        self.nonces += 1
        index = int(slot.rpartition("-")[2])
        call = Register(slot=slot, role=role, index=index, life=1, nonce=f"{slot}/{self.nonces}", **more)
        self.incarnations[slot] = self.post("/register", call, Registered).incarnation
        self.versions[slot] = None
        return self.incarnations[slot]

    def beat(self, slot: str, state: MemberState = MemberState.RUNNING, held: list[int] | None = None):
        relayed = [HeldVersion(version=version, digest=f"d{version}") for version in held or []]
        beat = Heartbeat(slot=slot, incarnation=self.incarnations[slot], state=state, held=relayed)
        return self.post("/heartbeat", beat, HeartbeatReply)

    def events(self, kind: str) -> list[str]:
        return [event.text for event in self.get("/events", Events, after=0, limit=1000).root if event.kind == kind]

    def start_training(self) -> None:
        self.start()
        while self.status().phase == "evaluatingFirst":
            self.generate("rollout-0")

    def granted(self, slot: str) -> list[SampleGrant]:
        return [sample for group in self.lease(slot).groups for sample in group.samples]

    def ask(self, slot: str, wait_s: float = 0.0) -> LeaseReply:
        call = LeaseCall(
            slot=slot, incarnation=self.incarnations[slot], version=self.versions[slot], max_running=8, wait_s=wait_s
        )
        return self.pack("/lease", call, LeaseReply)

    def lease(self, slot: str, wait_s: float = 0.0) -> LeaseReply:
        reply = self.ask(slot, wait_s)
        if reply.kind is LeaseKind.REFRESH:
            self.versions[slot] = reply.version
            return self.lease(slot, wait_s)
        return reply

    def say(self, slot: str, incarnation: int | None = None, **items) -> ProgressReply:
        incarnation = self.incarnations[slot] if incarnation is None else incarnation
        return self.pack("/progress", ProgressCall(slot=slot, incarnation=incarnation, **items), ProgressReply)

    def generate(self, slot: str) -> int:
        """One lease to its end: streamed in two halves, finished, graded. Returns the number of samples."""
        reply = self.lease(slot)
        samples = [sample for group in reply.groups for sample in group.samples]
        for half in (0, 1):
            self.say(slot, appends=[append(s, half) for s in samples if not s.finish_reason])
        finishes = [FinishItem(id=s.id, term=s.term, length=len(response(s)), reason="stop") for s in samples]
        self.say(slot, finishes=finishes)
        self.say(slot, grades=[grade(s) for s in samples])
        return len(samples)

    def chain(self, epoch: int = 1) -> None:
        body = ChainEpoch(epoch=epoch, members=[ChainMember(slot="relay-0", address="127.0.0.1:9")])
        self.post("/epoch", body, Ack)

    def begin(self, attempt: int, restored_step: int = 0) -> BeginAttemptReply:
        self.attempt = attempt
        reply = self.post(
            "/trainer/begin", BeginAttempt(attempt=attempt, restored_step=restored_step), BeginAttemptReply
        )
        self.publish(restored_step, reply.restored_version)
        return reply

    def publish(self, step: int, parent: int | None) -> None:
        body = ReserveVersion(attempt=self.attempt, step=step, parent=parent)
        self.version = self.post("/trainer/reserve", body, ReservedVersion).version
        complete = VersionComplete(
            slot="relay-0", incarnation=self.incarnations["relay-0"], epoch=1, version=self.version, digest=f"d{step}"
        )
        self.post("/relay/complete", complete, Ack)
        view = self.get(f"/trainer/publication/{self.version}", PublicationView, attempt=self.attempt, wait_s=5)
        assert view.visible

    def take(self, step: int, attempt: int | None = None) -> TakeReply:
        return self.post("/trainer/take", Take(attempt=attempt or self.attempt, step=step, wait_s=0.0), TakeReply)

    def batch(self, step: int) -> list[str]:
        self.before()
        params = {"attempt": self.attempt, "step": step, "rank": 0, "world": 1}
        slice_ = self.client.get_msgpack("/v1/trainer/slice", BatchSlice, deadline_s=60.0, params=params)
        for group in slice_.groups:
            for sample in group.samples:
                assert sample.tokens == pack_tokens(response_of(sample.id)), "the stored response is what was sent"
        return [sample.id for group in slice_.groups for sample in group.samples]

    def commit(self, step: int) -> None:
        self.post(
            "/trainer/commit",
            CommitStep(attempt=self.attempt, step=step, stats={"loss": 0.5, "stall_s": 0.25, "handover_wait_s": 0.5}),
            Ack,
        )

    def checkpoint(self, step: int) -> CheckpointDurableReply:
        info = CheckpointInfo(step=step, attempt=self.attempt, path=f"step-{step}-attempt-{self.attempt}")
        return self.post(
            "/trainer/checkpoint", CheckpointDurable(attempt=self.attempt, checkpoint=info), CheckpointDurableReply
        )

    def start(self) -> None:
        self.join("relay-0", Role.RELAY)
        self.chain()
        self.join("rollout-0")
        self.join("rollout-1")
        self.begin(1)

    def train(self, last: int = STEPS) -> dict[int, list[str]]:
        """Until step `last` is committed, published and saved. Returns the sample ids of each batch."""
        batches: dict[int, list[str]] = {}
        deadline_s = time.monotonic() + 60
        step = self.status().committed_step + 1
        while step <= last:
            assert time.monotonic() < deadline_s, self.status()
            if self.take(step).status is not TakeStatus.BATCH:
                self.generate("rollout-0")
                self.generate("rollout-1")
                continue
            batches[step] = self.batch(step)
            self.commit(step)
            self.publish(step, self.version)
            self.checkpoint(step)
            step += 1
        return batches

    def finish(self) -> JobStatus:
        deadline_s = time.monotonic() + 60
        while (status := self.status()).phase != "complete":
            assert time.monotonic() < deadline_s, status
            self.generate("rollout-0")
            self.generate("rollout-1")
        return status


def response_of(id_: str) -> list[int]:
    return [random.Random(id_).randrange(200) for _ in range(6)]


def response(sample: SampleGrant) -> list[int]:
    return response_of(sample.id)


def append(sample: SampleGrant, half: int) -> AppendItem:
    """The first call sends the first three tokens, the second all of them: an overlap."""
    tokens = response(sample)[: 3 + 3 * half]
    return AppendItem(
        id=sample.id,
        term=sample.term,
        offset=0,
        tokens=pack_tokens(tokens),
        logprobs=pack_logprobs([-1.0] * len(tokens)),
    )


def grade(sample: SampleGrant) -> GradeItem:
    return GradeItem(id=sample.id, term=sample.term, status="ok", reward=float(sample.index % 2))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PoolProcess]:
    process = PoolProcess(tmp_path)
    process.start()
    yield process
    process.close()


def until(condition: Callable[[], bool], limit_s: float = 15.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        time.sleep(0.05)


def test_a_job_of_three_steps_ends_complete_and_its_audit_is_clean(pool: PoolProcess) -> None:
    actors = Actors(pool)
    actors.start()
    status = actors.status()
    assert status.phase == "evaluatingFirst" and status.evaluating is not None
    assert (status.evaluating.version, status.evaluating.num_done, status.evaluating.num_samples) == (0, 0, 4)
    assert actors.take(1).status is TakeStatus.WAIT, "training waits for the first evaluation"
    batches = actors.train()
    status = actors.finish()
    assert status.evaluating is None
    assert sorted(batches) == [1, 2, 3]
    assert status.committed_step == STEPS
    assert [(row.point, row.mode) for row in status.evaluations] == [
        ("first", "greedy"), ("first", "sampled"), ("last", "greedy"), ("last", "sampled"),
    ]  # fmt: skip
    assert sum(status.consumed.counts.values()) == status.counts.consumed == STEPS * PROMPTS * SAMPLES
    assert actors.lease("rollout-0").kind is LeaseKind.END
    assert actors.take(4).status is TakeStatus.DONE
    report = pool.audit()  # beside the running pool
    assert report.violations == []
    assert report.open == 0
    assert pool.terminate() == 0
    assert pool.audit() == report  # and after its death
    assert {file.name for file in pool.store.iterdir()} == {FILE_NAME, "ledger.lock"}, "reading made no file"
    with open_ledger(pool.store) as db:
        assert [row.step for row in read_steps(db)] == [1, 2, 3]
        assert len(read_evaluations(db)) == 4
        kept = [sample for sample in read_samples(db, step=1, with_tokens=True)]
        assert all(sample.tokens == pack_tokens(response_of(sample.id)) for sample in kept)
        assert {sample.slot for sample in kept} <= {"rollout-0", "rollout-1"}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kill_9_of_the_pool_at_any_call_loses_nothing(pool: PoolProcess, seed: int) -> None:
    rng = random.Random(seed)
    calls, at = 0, {rng.randrange(5, 60) for _ in range(3)}
    killers: list[threading.Thread] = []

    def kill_and_restart(delay_s: float) -> None:
        time.sleep(delay_s)
        pool.kill()
        pool.start()

    def maybe_kill() -> None:
        nonlocal calls
        calls += 1
        if calls in at:
            for thread in killers:
                thread.join()
            killers.append(threading.Thread(target=kill_and_restart, args=(rng.uniform(0, 0.02),)))
            killers[-1].start()

    actors = Actors(pool, maybe_kill)
    actors.start()
    actors.train()
    status = actors.finish()
    for thread in killers:
        thread.join()
    assert pool.life > 1, "it was killed at least once"
    assert status.counts.consumed == STEPS * PROMPTS * SAMPLES
    assert pool.audit().violations == []


def test_a_suspect_replicas_samples_move_and_its_old_terms_are_refused(pool: PoolProcess) -> None:
    actors = Actors(pool)
    actors.start_training()
    stream = CommandStream(pool, actors, "rollout-1")
    lost = [sample for group in actors.lease("rollout-0").groups for sample in group.samples]
    own = [sample for group in actors.lease("rollout-1").groups for sample in group.samples]
    assert lost and own
    actors.say("rollout-0", appends=[append(sample, 0) for sample in lost])
    CommandStream(pool, actors, "rollout-0").close()  # the agent has died
    until(lambda: actors.status().counts.moved_samples == len(lost))
    adopted = stream.read_adopted()
    assert {sample.id: sample.tokens for sample in adopted} == {
        sample.id: pack_tokens(response(sample)[:3]) for sample in lost
    }, "they go on from what was durable"
    late = actors.say("rollout-0", appends=[append(sample, 1) for sample in lost])
    assert {item.verdict for item in late.appends} == {Outcome.SUPERSEDED}
    old = actors.incarnations["rollout-0"]
    actors.join("rollout-0")
    with pytest.raises(Superseded):
        actors.say("rollout-0", incarnation=old)
    stream.close()


def test_a_silent_replica_is_suspect_after_three_seconds_and_one_that_beats_is_not(pool: PoolProcess) -> None:
    actors = Actors(pool)
    actors.start()
    until(lambda: (actors.beat("rollout-1"), suspects(actors) >= {"rollout-0"})[1], 6.0)
    assert "rollout-1" not in suspects(actors)
    actors.beat("rollout-0")
    assert "rollout-0" not in suspects(actors), "its next message ends the suspicion"
    pool.kill()
    pool.start()
    assert "rollout-1" not in suspects(actors), "a restarted pool grants everybody a full silent period"
    fence = Fence(slot="rollout-1", incarnation=actors.incarnations["rollout-1"], reason="test")
    actors.post("/fence", fence, Ack)
    with pytest.raises(Superseded):
        actors.beat("rollout-1")


def suspects(actors: Actors) -> set[str]:
    return {member.slot for member in actors.status().members if member.suspect}


def test_a_new_attempt_gets_the_same_batches_again_and_the_old_one_is_refused(pool: PoolProcess) -> None:
    actors = Actors(pool)
    actors.start()
    first = actors.train(last=2)
    assert [row.step for row in actors.get("/trainer/resume", ResumePoint).kept] == [1, 2]
    point = actors.get("/trainer/resume", ResumePoint, at_most=1).checkpoint
    assert point is not None and point.step == 1
    actors.post("/trainer/reserve", ReserveVersion(attempt=1, step=3, parent=actors.version), ReservedVersion)
    reply = actors.begin(2, restored_step=1)
    assert reply.restored_version == 1
    # What the first attempt did not complete never will be.
    assert "laminar_versions_burned 1.0" in get_text(pool, "/metrics")
    assert "laminar_trainer_attempt 2.0" in get_text(pool, "/metrics")
    with pytest.raises(Conflict) as refused:
        actors.take(2, attempt=1)
    assert refused.value.current == 2
    assert pool.audit().violations == [], "in the middle of a rolled-back step too"
    assert actors.take(2).status is TakeStatus.BATCH
    assert actors.batch(2) == first[2]
    actors.commit(2)
    actors.commit(2)  # a repeated call is answered as the first
    removable = actors.checkpoint(2).removable
    assert [info.path for info in removable] == ["step-2-attempt-1"]
    actors.publish(2, actors.version)
    actors.train()
    actors.finish()
    assert pool.audit().violations == []


def test_a_missed_save_counts_once_however_often_it_is_told(pool: PoolProcess) -> None:
    actors = Actors(pool)
    actors.start()
    missed = CheckpointFailed(attempt=1, step=1, reason="the disk is full")
    for _ in range(5):  # two missed saves would end this job
        actors.post("/trainer/checkpoint_failed", missed, Ack)
    status = actors.status()
    assert status.phase != "failed" and "the disk is full" in status.conditions["CheckpointStale"]
    actors.post("/trainer/checkpoint_failed", missed.model_copy(update={"step": 2}), Ack)
    assert actors.status().phase == "failed"


def test_a_stop_is_answered_with_stop_once_and_the_job_is_stopped_when_it_is_saved(pool: PoolProcess) -> None:
    actors = Actors(pool)
    actors.start()
    actors.train(last=1)
    while actors.take(2).status is not TakeStatus.BATCH:
        actors.generate("rollout-0")
    actors.post("/stop", StopRequest(reason="test"), Ack)
    assert actors.status().phase == "training", "step 2 is under way"
    actors.commit(2)
    assert actors.take(3).status is TakeStatus.STOP
    actors.checkpoint(2)
    assert actors.status().phase == "stopped"


@pytest.mark.root
def test_a_full_disk_makes_callers_wait_and_loses_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("this host does not allow to mount a tmpfs")
    process = PoolProcess(tmp_path, store=disk / "store")
    try:
        process.start()
        actors = Actors(process)
        actors.start()
        actors.train(last=1)
        ballast = disk / "ballast"
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(b"x" * 4096)
        done = threading.Event()
        worker = threading.Thread(target=lambda: (Actors.train(actors), actors.finish(), done.set()))
        worker.start()
        watcher = Actors(process)
        until(lambda: "DiskFull" in watcher.status().conditions)
        assert not done.is_set()
        until(lambda: "DiskFull" in get_text(process, "/readyz"))
        ballast.unlink()
        worker.join(60)
        assert done.is_set()
        assert watcher.status().conditions == {}
        assert process.audit().violations == []
    finally:
        process.close()
        subprocess.run(["umount", str(disk)], check=True)


def get_text(process: PoolProcess, path: str) -> str:
    connection = http.client.HTTPConnection(process.address, timeout=5)
    connection.request("GET", path)
    text = connection.getresponse().read().decode()
    connection.close()
    return text


class CommandStream:
    """An open command connection whose HELLO has been read."""

    def __init__(self, pool: PoolProcess, actors: Actors, slot: str) -> None:
        self.connection = http.client.HTTPConnection(pool.address, timeout=15)
        headers = {"authorization": f"Bearer {TOKEN}", "laminar-job": UID}
        path = f"/v1/commands/{slot}?incarnation={actors.incarnations[slot]}"
        try:
            self.connection.request("GET", path, headers=headers)
            self.answer = self.connection.getresponse()
            assert self.read().kind is CommandKind.HELLO
        except BaseException:
            self.connection.close()
            raise

    def read(self) -> Command:
        return decode(self.answer.read(int.from_bytes(self.answer.read(4), "little")), Command)

    def read_adopted(self) -> list[SampleGrant]:
        deadline_s = time.monotonic() + 10
        while (command := self.read()).kind is not CommandKind.ADOPT:
            assert time.monotonic() < deadline_s
        return [sample for group in command.groups for sample in group.samples]

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


def test_sigterm_ends_the_pool_with_0_and_moves_nothing(pool: PoolProcess) -> None:
    actors = Actors(pool)
    actors.start_training()
    stream = CommandStream(pool, actors, "rollout-0")
    held = [sample for group in actors.lease("rollout-0").groups for sample in group.samples]
    assert pool.process is not None
    pool.process.send_signal(signal.SIGTERM)
    assert pool.process.wait(timeout=20) == 0
    stream.close()
    pool.start()
    again = actors.lease("rollout-0")
    assert [(s.id, s.term) for group in again.groups for s in group.samples] == [(s.id, s.term) for s in held]


def test_synchronous_reads_staleness_0_everywhere(tmp_path: Path) -> None:
    process = PoolProcess(tmp_path, spec={"schedule": {"type": "synchronous"}})
    try:
        process.start()
        actors = Actors(process)
        actors.start()
        actors.train()
        status = actors.finish()
        samples = STEPS * PROMPTS * SAMPLES
        assert (status.inherent.counts, status.consumed.counts) == ({0: samples}, {0: samples})
        metrics = get_text(process, "/metrics")
        assert f'laminar_consumed_staleness_bucket{{le="0.0"}} {float(samples)}' in metrics
        assert "laminar_commit_seconds_count" in metrics
        assert "laminar_trainer_stall_seconds 0.75" in metrics
        assert "<title>Laminar" in get_text(process, f"/?token={TOKEN}")
        assert "unauthorized" in get_text(process, "/?token=wrong")
    finally:
        process.close()


def test_a_reward_that_is_no_number_and_a_mismatch_never_reach_a_batch(pool: PoolProcess) -> None:
    actors = Actors(pool)
    actors.start_training()
    first, second = [sample for group in actors.lease("rollout-0").groups for sample in group.samples]
    actors.say("rollout-0", appends=[append(sample, 1) for sample in (first, second)])
    other = AppendItem(
        id=second.id, term=second.term, offset=0, tokens=pack_tokens([9] * 7), logprobs=pack_logprobs([-1.0] * 7)
    )
    (verdict,) = actors.say("rollout-0", appends=[other]).appends
    assert verdict.verdict is Outcome.MISMATCH
    actors.say("rollout-0", finishes=[FinishItem(id=first.id, term=first.term, length=6, reason="stop")])
    nan = GradeItem(id=first.id, term=first.term, status="ok", reward=float("nan"))
    actors.say("rollout-0", grades=[nan])
    counts = actors.status().counts
    assert counts.discarded == {"ungraded": 1}
    assert (counts.restarted_samples, counts.restarted_tokens) == (1, 6)
    actors.train()
    actors.finish()
    assert pool.audit().violations == []


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"model": {"source": "file:/nowhere"}}, "the model folder /nowhere does not exist"),
        ({"data": {"train": {"source": f"file:{MODEL}/config.json"}}}, "not a JSON object"),
        ({"sampling": {}, "data": None}, "LAMINAR_SPEC"),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_code_2(tmp_path: Path, spec: dict, words: str) -> None:
    process = PoolProcess(tmp_path, spec=spec)
    process.start()
    assert process.process is not None
    assert process.process.wait(timeout=30) == 2
    process.sock.close()
    text = (tmp_path / "pool.log").read_text()
    assert words in text
    assert "Traceback" not in text


def test_changed_data_under_a_begun_job_is_refused(pool: PoolProcess, tmp_path: Path) -> None:
    Actors(pool).start()
    pool.kill()
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "more", "answer": "1"}) + "\n")
    pool.start()
    assert pool.process is not None
    assert pool.process.wait(timeout=30) == 2
    assert "Start a new run" in (tmp_path / "pool.log").read_text()


def test_a_replica_that_leaves_hands_its_work_over_at_once_and_is_held_against_nothing(pool: PoolProcess) -> None:
    """Case B15: eviction is no crash."""
    actors = Actors(pool)
    actors.start_training()
    stream = CommandStream(pool, actors, "rollout-1")
    left, own = actors.granted("rollout-0"), actors.granted("rollout-1")
    assert left and own
    actors.say("rollout-0", appends=[append(sample, 0) for sample in left])
    actors.beat("rollout-0", MemberState.DRAINING)
    assert actors.ask("rollout-0").kind is LeaseKind.WAIT, "it is given nothing more"
    actors.say("rollout-0", appends=[append(sample, 1) for sample in left])
    actors.beat("rollout-0", MemberState.STOPPED)
    adopted = stream.read_adopted()
    assert {sample.id: sample.tokens for sample in adopted} == {s.id: pack_tokens(response(s)) for s in left}
    assert "rollout-0" not in suspects(actors)
    for _ in range(3):  # whoever takes it on and leaves is no victim of it either
        actors.join("rollout-0")
        actors.beat("rollout-0", MemberState.STOPPED)
    counts = actors.status().counts
    assert (counts.moved_samples, counts.restarted_samples, counts.poisoned_samples) == (len(left), 0, 0)
    stream.close()


def partials_of_version_0(actors: Actors) -> list[SampleGrant]:
    """What rollout-0 still runs with version 0 when version 1 has been published."""
    actors.start_training()
    actors.beat("relay-0", held=[0])
    running = actors.granted("rollout-0")
    actors.say("rollout-0", appends=[append(sample, 0) for sample in running])
    while actors.take(1).status is not TakeStatus.BATCH:
        actors.generate("rollout-1")
    actors.commit(1)
    actors.publish(1, actors.version)
    return running


def test_partials_of_an_older_version_go_on_at_the_replica_that_loads_it_from_its_relay(pool: PoolProcess) -> None:
    actors = Actors(pool)
    lost = partials_of_version_0(actors)
    assert actors.beat("relay-0", held=[0, 1]).retain == [0], "the relay is asked to keep it"
    actors.generate("rollout-1")
    assert actors.versions["rollout-1"] == 1
    actors.join("rollout-0")  # its engine has died
    assert reload_of(actors.ask("rollout-1")) == 0
    pool.kill()
    pool.start()
    actors.beat("relay-0", held=[0, 1])
    assert reload_of(actors.ask("rollout-1")) == 0, "a restarted pool comes to the same"
    actors.versions["rollout-1"] = 0
    again = actors.granted("rollout-1")
    assert {(s.id, s.tokens) for s in again} == {(s.id, pack_tokens(response(s)[:3])) for s in lost}
    assert {sample.max_new_tokens for sample in again} == {sample.max_new_tokens for sample in lost}
    actors.say("rollout-1", appends=[append(sample, 1) for sample in again])
    finishes = [FinishItem(id=s.id, term=s.term, length=6, reason="stop") for s in again]
    actors.say("rollout-1", finishes=finishes, grades=[grade(sample) for sample in again])
    counts = actors.status().counts
    assert (counts.restarted_samples, counts.parked_samples) == (0, len(lost))
    assert any("loads version 0 for" in text for text in actors.events("redirect"))
    actors.train()
    actors.finish()
    assert pool.audit().violations == []


def reload_of(reply: LeaseReply) -> int:
    assert reply.kind is LeaseKind.REFRESH, reply
    return reply.version


def test_partials_start_again_when_no_relay_has_their_version(pool: PoolProcess) -> None:
    actors = Actors(pool)
    lost = partials_of_version_0(actors)
    actors.beat("relay-0", held=[0, 1])
    actors.join("rollout-0")
    assert actors.status().counts.parked_samples == len(lost)
    until(lambda: (actors.beat("relay-0", held=[1]), actors.status().counts.restarted_samples == len(lost))[1])
    assert actors.status().counts.restarted_tokens == 3 * len(lost)
    actors.train()
    actors.finish()
    assert pool.audit().violations == []


def test_a_sample_that_ran_in_two_dying_engines_is_set_aside_named_and_counted(pool: PoolProcess) -> None:
    actors = Actors(pool)
    actors.start_training()
    poison = actors.granted("rollout-0")
    actors.join("rollout-0")
    assert {s.id for s in actors.granted("rollout-1")} == {s.id for s in poison}, "one death condemns nobody"
    pool.kill()
    pool.start()
    actors.join("rollout-1")
    status = actors.status()
    assert (status.counts.poisoned_samples, status.counts.discarded) == (len(poison), {"failed": len(poison)})
    assert "rollout-0#1, rollout-1#1" in status.conditions["PoisonSamples"]
    assert len(actors.events("poison")) == len(poison)
    actors.train()
    actors.finish()
    assert pool.audit().violations == []


def test_an_engine_without_a_token_for_stall_seconds_is_fenced_and_its_work_moves(tmp_path: Path) -> None:
    process = PoolProcess(tmp_path, spec={"rollout": {"replicas": 2, "stallSeconds": 5}})
    try:
        process.start()
        actors = Actors(process)
        actors.start_training()
        stream = CommandStream(process, actors, "rollout-0")
        stalled = actors.granted("rollout-0")
        old = actors.incarnations["rollout-0"]
        until(lambda: stalled_out(actors), 20.0)
        deadline_s = time.monotonic() + 10
        while stream.read().kind is not CommandKind.FENCE:
            assert time.monotonic() < deadline_s
        stream.close()
        with pytest.raises(Superseded):
            actors.say("rollout-0", incarnation=old)
        assert {s.id for s in actors.granted("rollout-1")} == {s.id for s in stalled}
    finally:
        process.close()


def stalled_out(actors: Actors) -> bool:
    """The replicas answer all the while."""
    if actors.events("stalled"):
        return True
    actors.beat("rollout-1")
    with suppress(Superseded):  # it may be fenced just now
        actors.beat("rollout-0")
    return False


def test_dynamic_sampling_fills_up_with_other_prompts_and_the_audit_balances(tmp_path: Path) -> None:
    algorithm = {"promptsPerStep": PROMPTS, "samplesPerPrompt": SAMPLES, "dynamicSampling": {"maxRefills": 2}}
    process = PoolProcess(tmp_path, spec={"algorithm": algorithm})
    try:
        process.start()
        actors = Actors(process)
        actors.start_training()
        for _ in range(2 * PROMPTS):
            samples = actors.granted("rollout-0")
            actors.say(
                "rollout-0", finishes=[FinishItem(id=s.id, term=s.term, length=0, reason="stop") for s in samples]
            )
            equal = [GradeItem(id=s.id, term=s.term, status="ok", reward=1.0) for s in samples]
            actors.say("rollout-0", grades=equal)
        until(lambda: "DynamicSamplingCapped" in actors.status().conditions)
        actors.train()
        status = actors.finish()
        assert status.counts.discarded["filtered"] == 2 * PROMPTS * SAMPLES
        until(lambda: "DynamicSamplingCapped" not in actors.status().conditions)
        assert process.audit().violations == []
    finally:
        process.close()


def test_results_of_tools_reach_the_trainer_as_such_also_over_a_redirect_and_a_restart(pool: PoolProcess) -> None:
    actors = Actors(pool)
    actors.start_training()
    first, _ = actors.granted("rollout-0")
    tokens = response(first)
    tool = AppendItem(
        id=first.id, term=first.term, offset=2, tokens=pack_tokens(tokens[2:4]), logprobs=pack_logprobs([0.0] * 2),
        kind=SegmentKind.TOOL, call=0,
    )  # fmt: skip
    model = AppendItem(
        id=first.id, term=first.term, offset=0, tokens=pack_tokens(tokens[:2]), logprobs=pack_logprobs([-1.0] * 2)
    )
    assert {item.verdict for item in actors.say("rollout-0", appends=[model, tool]).appends} == {Outcome.OK}
    pool.kill()
    pool.start()
    actors.beat("relay-0", held=[0])
    actors.join("rollout-0")
    again, other = sorted(actors.granted("rollout-1"), key=lambda sample: sample.id != first.id)
    assert (again.tools, again.tokens) == ([ToolSpan(2, 2, 0)], pack_tokens(tokens[:4]))
    rest = AppendItem(
        id=again.id, term=again.term, offset=4, tokens=pack_tokens(tokens[4:]), logprobs=pack_logprobs([-1.0] * 2)
    )
    actors.say("rollout-1", appends=[rest, append(other, 1)])
    finishes = [FinishItem(id=s.id, term=s.term, length=6, reason="stop") for s in (again, other)]
    actors.say("rollout-1", finishes=finishes, grades=[grade(again), grade(other)])
    while actors.take(1).status is not TakeStatus.BATCH:
        actors.generate("rollout-0")
    params = {"attempt": actors.attempt, "step": 1, "rank": 0, "world": 1}
    slice_ = actors.client.get_msgpack("/v1/trainer/slice", BatchSlice, deadline_s=60.0, params=params)
    tools = {sample.id: sample.tools for group in slice_.groups for sample in group.samples}
    assert tools[first.id] == [ToolSpan(2, 2, 0)]
    assert all(not spans for name, spans in tools.items() if name != first.id)


def test_every_step_of_a_long_run_is_told_page_by_page_though_most_are_only_in_the_store(tmp_path: Path) -> None:
    num_steps, kept_step = 2600, 2500
    pool = PoolProcess(tmp_path, {"steps": 3000})
    try:
        pool.start()
        pool.client("first").get_json("/v1/status", JobStatus, 15.0, deadline_s=60.0)
        pool.kill()
        with sqlite3.connect(pool.store / FILE_NAME) as db:
            for step in range(1, num_steps + 1):
                row = StepRow(
                    step=step, attempt=1, version=None, wall_s=0.0, reward_mean=step / 4, num_samples=4,
                    response_tokens=3, inherent={1: 4}, consumed={2: 4},
                )  # fmt: skip
                db.execute("INSERT INTO steps VALUES (?, ?)", (step, row.model_dump_json()))
            checkpoint = (f"step-{kept_step}-attempt-1", kept_step, 1, "{}", "kept")
            db.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?)", checkpoint)
            db.execute("UPDATE meta SET value = ? WHERE key = 'committed_step'", (str(num_steps),))
        db.close()
        pool.start()
        client, rows, after = pool.client("second"), list[StepRow](), -1
        while page := client.get_json("/v1/steps", Steps, 15.0, deadline_s=60.0, params={"after": after}).root:
            rows += page
            after = page[-1].step
        assert [row.step for row in rows] == list(range(1, num_steps + 1))
        status = client.get_json("/v1/status", JobStatus, 15.0, deadline_s=60.0)
        assert (status.inherent.counts, status.consumed.counts) == ({1: 4 * num_steps}, {2: 4 * num_steps})
        assert status.last_step == rows[-1] and status.reward_curve[0] == 0.25
    finally:
        pool.close()
