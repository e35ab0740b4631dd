"""The pool under the load of a large job: durable token streams, latency meanwhile, a million trajectories, reopening.

    python benchmarks/pool.py --quick      10 s of streams, 100,000 trajectories; under 50 s
    python benchmarks/pool.py              30 s of streams, 1,000,000 trajectories

Streams: 8,192 running trajectories on 128 replicas, each of which sends one call a second with 64 appends of 122
tokens and their log-probs, beside its heartbeat and its command connection. Load, probes and pool are processes of
their own; the pool's CPU seconds are those of its process with all threads. One JSON line a quantity.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laminar.shell.audit import read_audit
from laminar.shell.blocking import BlockingClient
from laminar.shell.client import PoolClient
from laminar.shell.settings import Common
from laminar.wire.dataplane import (
    AppendItem,
    Command,
    CommandKind,
    FinishItem,
    GradeItem,
    LeaseCall,
    LeaseKind,
    LeaseReply,
    ProgressCall,
    ProgressReply,
    SampleGrant,
)
from laminar.wire.messages import (
    Ack,
    BeginAttempt,
    BeginAttemptReply,
    ChainEpoch,
    ChainMember,
    CheckpointDurable,
    CheckpointDurableReply,
    CheckpointInfo,
    CommitStep,
    Fence,
    Heartbeat,
    HeartbeatReply,
    MemberState,
    Register,
    Registered,
    ReservedVersion,
    ReserveVersion,
    Role,
    Take,
    TakeReply,
    TakeStatus,
    VersionComplete,
)

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests" / "data" / "grpo_reference" / "reference_model"
TOKEN, UID = "token", "pool-bench"
RUNNING = 64
NUM_REPLICAS = int(os.environ.get("LAMINAR_BENCH_REPLICAS", "128"))
"""Fewer on a machine that others use as well; the targets are for 128."""
TOKENS = 122
"""Of one append: 8,192 of them a second are a million tokens a second."""
GROUPS_A_STEP, SAMPLES_A_GROUP = 512, 16
NUM_LOADS = 2
TARGET_PER_CPU_S, TARGET_P99_MS, TARGET_RSS_MB, TARGET_REOPEN_S = 1e6, 50.0, 300.0, 10.0
SHORT = 16
"""Tokens of a trajectory of the million."""
TICKS = os.sysconf("SC_CLK_TCK")
PACE = threading.Event()
"""Never set: `PACE.wait(s)` paces probes."""


def emit(metric: str, value: float | None, unit: str, target: str, *, ok: bool, reference: str = "") -> None:
    shown = None if value is None else round(value, 4)
    line = dict(bench="pool", metric=metric, value=shown, unit=unit, target=target, reference=reference)
    print(json.dumps({**line, "ok": ok}), flush=True)


def cpu_s(pid: int) -> float:
    """User and system seconds of a process, all threads."""
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / TICKS


def memory_mb(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


# --- the pool -----------------------------------------------------------------------------------------------------


class PoolProcess:
    """The pool on a socket of ours, which holds callers while it is being started again."""

    def __init__(self, root: Path, samples_a_group: int, steps: int) -> None:
        self.root = root
        rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(2000)]
        (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = {
            "steps": steps,
            "model": {"source": f"file:{MODEL}"},
            "data": {"train": {"source": f"file:{root}/data.jsonl"}},
            "rewards": [{"name": "right", "type": "exact"}],
            "sampling": {"maxResponseTokens": 16384},
            "algorithm": {"promptsPerStep": GROUPS_A_STEP, "samplesPerPrompt": samples_a_group},
            "trainer": {"checkpoint": {"everySteps": 1, "keep": 2}},
            "rollout": {
                "replicas": NUM_REPLICAS,
                "promptsPerLease": RUNNING // samples_a_group,
                "engine": {"type": "torch", "maxRunning": RUNNING},
            },
        }
        (root / "job.json").write_text(json.dumps({"metadata": {"name": "bench"}, "spec": spec}))
        self.sock = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{self.sock.getsockname()[1]}"
        self.life = 0
        self.start()

    def start(self) -> None:
        self.life += 1
        common = Common(
            job="bench", job_uid=UID, token=TOKEN, spec_path=self.root / "job.json", generation=1, pool_url=self.url,
            slot="pool-0", life=self.life, listen=f"fd:{self.sock.fileno()}", dir=self.root,
        )  # fmt: skip
        env = os.environ | common.to_env() | {"LAMINAR_STORE": str(self.root / "store"), "OMP_NUM_THREADS": "1"}
        with (self.root / "pool.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "laminar.pool"], env=env, stderr=log, pass_fds=[self.sock.fileno()]
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def client(self, name: str) -> BlockingClient:
        return BlockingClient(self.url, TOKEN, UID, 1, name)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.sock.close()

    def store_mb(self) -> float:
        return sum(file.stat().st_size for file in (self.root / "store").iterdir()) / 2**20


@contextlib.contextmanager
def pool_process(samples_a_group: int, steps: int) -> Iterator[PoolProcess]:
    root = Path(tempfile.mkdtemp(prefix="laminar-pool-bench-"))
    pool = PoolProcess(root, samples_a_group, steps)
    try:
        yield pool
    finally:
        pool.close()
        shutil.rmtree(root, ignore_errors=True)


class Trainer:
    """One relay and one trainer, played: publications, batches, steps, checkpoints."""

    def __init__(self, client: BlockingClient) -> None:
        self.client = client
        relay = Register(slot="relay-0", role=Role.RELAY, index=0, life=1, nonce="r")
        self.relay = self.post("/register", relay, Registered).incarnation
        members = [ChainMember(slot="relay-0", address="127.0.0.1:9")]
        self.post("/epoch", ChainEpoch(epoch=1, members=members), Ack)
        self.post("/trainer/begin", BeginAttempt(attempt=1, restored_step=0), BeginAttemptReply)
        self.version: int | None = None
        self.publish(0)

    def post(self, path: str, body: Any, reply: Any) -> Any:
        return self.client.post_json(f"/v1{path}", body, reply, 30.0, deadline_s=60.0)

    def publish(self, step: int) -> None:
        reserve = ReserveVersion(attempt=1, step=step, parent=self.version)
        self.version = self.post("/trainer/reserve", reserve, ReservedVersion).version
        assert self.version is not None
        complete = VersionComplete(
            slot="relay-0", incarnation=self.relay, epoch=1, version=self.version, digest=f"d{step}"
        )
        self.post("/relay/complete", complete, Ack)

    def beat(self) -> None:
        beat = Heartbeat(slot="relay-0", incarnation=self.relay, state=MemberState.RUNNING)
        self.post("/heartbeat", beat, HeartbeatReply)

    def train(self, step: int) -> bool:
        """Takes, commits, publishes and saves step `step`, if its batch is there."""
        if self.post("/trainer/take", Take(attempt=1, step=step, wait_s=1.0), TakeReply).status is not TakeStatus.BATCH:
            return False
        self.post("/trainer/commit", CommitStep(attempt=1, step=step, stats={"loss": 0.1}), Ack)
        self.publish(step)
        info = CheckpointInfo(step=step, attempt=1, path=f"step-{step}-attempt-1")
        self.post("/trainer/checkpoint", CheckpointDurable(attempt=1, checkpoint=info), CheckpointDurableReply)
        return True


# --- load: token streams ------------------------------------------------------------------------------------------


class Replica:
    """One scripted replica with RUNNING trajectories."""

    def __init__(self, client: PoolClient, index: int) -> None:
        self.client, self.slot, self.index = client, f"rollout-{index}", index
        self.incarnation = 0
        self.samples: list[SampleGrant] = []
        self.length = 0
        self.num_tokens = 0
        self.slowest_s = 0.0
        rng = random.Random(index)
        self.bodies = [(rng.randbytes(4 * TOKENS), rng.randbytes(4 * TOKENS)) for _ in range(RUNNING)]

    async def join(self, version: int) -> None:
        register = Register(slot=self.slot, role=Role.ROLLOUT, index=self.index, life=1, nonce=self.slot)
        self.incarnation = (await self.client.post_json("/v1/register", register, Registered)).incarnation
        call = LeaseCall(slot=self.slot, incarnation=self.incarnation, version=version, max_running=RUNNING)
        reply = await self.client.post_msgpack("/v1/lease", call, LeaseReply)
        assert reply.kind is LeaseKind.GRANT, reply
        self.samples = [sample for group in reply.groups for sample in group.samples]
        assert len(self.samples) == RUNNING

    async def append(self) -> None:
        """TOKENS more of each trajectory; counted once durable."""
        items = [
            AppendItem(id=sample.id, term=sample.term, offset=self.length, tokens=tokens, logprobs=logprobs)
            for sample, (tokens, logprobs) in zip(self.samples, self.bodies, strict=True)
        ]
        call = ProgressCall(slot=self.slot, incarnation=self.incarnation, appends=items)
        began_s = time.monotonic()
        reply = await self.client.post_msgpack("/v1/progress", call, ProgressReply)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
        self.length += TOKENS
        assert all(item.durable == self.length for item in reply.appends), reply.appends[0]
        self.num_tokens += TOKENS * len(items)

    async def live(self, ends_s: float) -> None:
        """Appends and heartbeats once a second each, commands open, from a moment of its own on."""
        await asyncio.sleep(self.index / NUM_REPLICAS)
        next_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(self.listen())
            while next_s < ends_s:
                async with asyncio.TaskGroup() as turn:
                    turn.create_task(self.append())
                    turn.create_task(self.beat())
                next_s += 1.0
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            listening.cancel()

    async def beat(self) -> None:
        beat = Heartbeat(slot=self.slot, incarnation=self.incarnation, state=MemberState.RUNNING, version=0)
        await self.client.post_json("/v1/heartbeat", beat, HeartbeatReply)

    async def listen(self) -> None:
        path = f"/v1/commands/{self.slot}"
        async for command in self.client.stream_frames(path, Command, params={"incarnation": self.incarnation}):
            assert command.kind in (CommandKind.HELLO, CommandKind.PING), command


async def stream_load(url: str, number: int, load_s: float) -> None:
    """A share of the replicas; prints "ready" once all have their trajectories, then what they did."""
    mine = range(number, NUM_REPLICAS, NUM_LOADS)
    async with PoolClient(url, TOKEN, UID, 1, f"load-{number}") as client:
        replicas = [Replica(client, index) for index in mine]
        await asyncio.gather(*(replica.join(0) for replica in replicas))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        ends_s = time.monotonic() + load_s
        await asyncio.gather(*(replica.live(ends_s) for replica in replicas))
    done = {"tokens": sum(r.num_tokens for r in replicas), "slowest_s": max(r.slowest_s for r in replicas)}
    print(json.dumps(done), flush=True)


def probe(url: str, load_s: float) -> None:
    """Leases with work available, and commands, while the load runs: how long each takes."""
    client = BlockingClient(url, TOKEN, UID, 1, "probe")
    leases: list[float] = []
    commands: list[float] = []
    print("ready", flush=True)
    sys.stdin.readline()
    ends_s = time.monotonic() + load_s
    turn = 0
    while time.monotonic() < ends_s:
        leases.append(probe_lease(client, turn))
        commands.append(probe_command(client, url, turn))
        turn += 1
        PACE.wait(max(0.0, 0.1 - leases[-1] - commands[-1]))
    print(json.dumps({"leases": leases, "commands": commands}), flush=True)


def probe_lease(client: BlockingClient, turn: int) -> float:
    """The seconds of one lease that is granted; what it got ends at once, so that the next one gets new work."""
    slot = "rollout-900"
    register = Register(slot=slot, role=Role.ROLLOUT, index=900, life=1, nonce=f"{slot}/{turn}")
    incarnation = client.post_json("/v1/register", register, Registered).incarnation
    call = LeaseCall(slot=slot, incarnation=incarnation, version=0, max_running=RUNNING, wait_s=0.0)
    began_s = time.monotonic()
    reply = client.post_msgpack("/v1/lease", call, LeaseReply)
    took_s = time.monotonic() - began_s
    assert reply.kind is LeaseKind.GRANT, reply
    samples = [sample for group in reply.groups for sample in group.samples]
    finishes = [FinishItem(id=sample.id, term=sample.term, length=0, reason="stop") for sample in samples]
    grades = [
        GradeItem(id=sample.id, term=sample.term, status="ok", reward=float(s % 2)) for s, sample in enumerate(samples)
    ]
    call = ProgressCall(slot=slot, incarnation=incarnation, finishes=finishes, grades=grades)
    client.post_msgpack("/v1/progress", call, ProgressReply)
    return took_s


def probe_command(client: BlockingClient, url: str, turn: int) -> float:
    """The seconds from a call that makes the pool command something to the command."""
    slot = "rollout-901"
    register = Register(slot=slot, role=Role.ROLLOUT, index=901, life=1, nonce=f"{slot}/{turn}")
    incarnation = client.post_json("/v1/register", register, Registered).incarnation
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as stream:
        head = f"GET /v1/commands/{slot}?incarnation={incarnation} HTTP/1.1\r\nhost: pool\r\n"
        stream.sendall(f"{head}authorization: Bearer {TOKEN}\r\nlaminar-job: {UID}\r\n\r\n".encode())
        seen = b""
        while b"hello" not in seen:
            seen += stream.recv(65536)
        began_s = time.monotonic()
        client.post_json("/v1/fence", Fence(slot=slot, incarnation=incarnation, reason="probe"), Ack)
        while b"fence" not in seen:
            seen += stream.recv(65536)
        return time.monotonic() - began_s


@dataclass(frozen=True)
class Streams:
    tokens: int
    wall_s: float
    cpu_s: float
    slowest_s: float
    leases: list[float]
    commands: list[float]

    @property
    def per_cpu_s(self) -> float:
        return self.tokens / self.cpu_s


def spawn(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def run_together(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n", "a load did not get ready"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, "a load failed"
    return dict(json.loads(out.splitlines()[-1]))


def measure_streams(load_s: float, profile: str) -> Streams:
    with pool_process(SAMPLES_A_GROUP, steps=1000) as pool:
        Trainer(pool.client("trainer"))
        loads = [spawn("--role", "load", pool.url, str(number), str(load_s)) for number in range(NUM_LOADS)]
        loads.append(spawn("--role", "probe", pool.url, str(load_s)))
        run_together(loads)
        before_s, began_s = cpu_s(pool.pid), time.monotonic()
        if profile:
            perf = ["perf", "record", "-g", "-F", "499", "-p", str(pool.pid), "-o", profile, "--", "sleep", str(load_s)]
            subprocess.run(perf, check=True, stderr=subprocess.DEVNULL)
        results = [result_of(process) for process in loads]
        wall_s, used_s = time.monotonic() - began_s, cpu_s(pool.pid) - before_s
        pool.process.kill()
        pool.process.wait()
        report = read_audit(pool.root / "store")
        assert report.ok, report.violations
    tokens = sum(result.get("tokens", 0) for result in results)
    slowest_s = max(result.get("slowest_s", 0.0) for result in results)
    return Streams(tokens, wall_s, used_s, slowest_s, results[-1]["leases"], results[-1]["commands"])


# --- the same load into Redis Streams -----------------------------------------------------------------------------


def measure_redis(load_s: float) -> tuple[float, float] | str:
    """Tokens per CPU second and per second of redis-server, AOF fsynced always; or why there is no number."""
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        return "redis-server is not installed (Debian: apt-get install redis-server)"
    folder = Path(tempfile.mkdtemp(prefix="laminar-redis-bench-"))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    options = ["--port", str(port), "--dir", str(folder), "--appendonly", "yes", "--appendfsync", "always",
               "--save", "", "--auto-aof-rewrite-percentage", "0"]  # fmt: skip
    process = subprocess.Popen([server, *options], stdout=subprocess.DEVNULL)
    try:
        loads = [spawn("--role", "redis", str(port), str(number), str(load_s)) for number in range(NUM_LOADS)]
        run_together(loads)
        before_s, began_s = cpu_s(process.pid), time.monotonic()
        tokens = sum(result_of(load)["tokens"] for load in loads)
        used_s = cpu_s(process.pid) - before_s
        return tokens / used_s, tokens / (time.monotonic() - began_s)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


async def redis_load(port: int, number: int, load_s: float) -> None:
    """One pipeline a replica and second, one XADD an append; a turn ends with its last answer."""
    mine = range(number, NUM_REPLICAS, NUM_LOADS)
    connections = [await redis_connect(port) for _ in mine]
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    ends_s = time.monotonic() + load_s
    done = await asyncio.gather(*(redis_replica(i, *c, ends_s) for i, c in zip(mine, connections, strict=True)))
    print(json.dumps({"tokens": sum(done)}), flush=True)


async def redis_connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    deadline_s = time.monotonic() + 10
    while True:
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            assert time.monotonic() < deadline_s, "redis-server does not answer"
            await asyncio.sleep(0.05)


async def redis_replica(index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ends_s: float) -> int:
    rng = random.Random(index)
    parts = [(rng.randbytes(4 * TOKENS), rng.randbytes(4 * TOKENS)) for _ in range(RUNNING)]
    entries = [
        resp(b"XADD", f"t/{index}/{i}".encode(), b"*", b"t", tokens, b"l", logprobs)
        for i, (tokens, logprobs) in enumerate(parts)
    ]
    await asyncio.sleep(index / NUM_REPLICAS)
    next_s, num_tokens = time.monotonic(), 0
    while next_s < ends_s:
        writer.write(b"".join(entries))
        for _ in entries:
            head = await reader.readline()
            assert head.startswith(b"$"), head
            await reader.readline()
        num_tokens += TOKENS * RUNNING
        next_s += 1.0
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
    writer.close()
    return num_tokens


def resp(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


# --- a million trajectories ---------------------------------------------------------------------------------------


async def through_load(url: str, number: int, num_replicas: int) -> None:
    """Replicas that lease, end at once and lease again, until the pool says that it needs nothing more."""
    async with PoolClient(url, TOKEN, UID, 1, f"through-{number}") as client:
        replicas = [Replica(client, index) for index in range(number, num_replicas, NUM_LOADS)]
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.gather(*(pass_through(replica) for replica in replicas))
    print("{}", flush=True)


async def pass_through(replica: Replica) -> None:
    client = replica.client
    register = Register(slot=replica.slot, role=Role.ROLLOUT, index=replica.index, life=1, nonce=replica.slot)
    incarnation = (await client.post_json("/v1/register", register, Registered)).incarnation
    tokens, logprobs = replica.bodies[0][0][: 4 * SHORT], replica.bodies[0][1][: 4 * SHORT]
    version: int | None = None
    while True:
        call = LeaseCall(slot=replica.slot, incarnation=incarnation, version=version, max_running=RUNNING, wait_s=5.0)
        reply = await client.post_msgpack("/v1/lease", call, LeaseReply)
        if reply.kind is LeaseKind.END:
            return
        if reply.kind is LeaseKind.REFRESH:
            version = reply.version
        samples = [sample for group in reply.groups for sample in group.samples]
        if not samples:
            continue
        said = ProgressCall(
            slot=replica.slot,
            incarnation=incarnation,
            appends=[AppendItem(id=s.id, term=s.term, offset=0, tokens=tokens, logprobs=logprobs) for s in samples],
            finishes=[FinishItem(id=s.id, term=s.term, length=SHORT, reason="stop") for s in samples],
            grades=[GradeItem(id=s.id, term=s.term, status="ok", reward=float(s.index % 2)) for s in samples],
        )
        await client.post_msgpack("/v1/progress", said, ProgressReply)


@dataclass(frozen=True)
class Million:
    num: int
    wall_s: float
    rss_mb: float
    growth_mb: float
    store_mb: float
    reopen_s: float


def measure_million(num: int) -> Million:
    steps = max(4, num // (GROUPS_A_STEP * SAMPLES_A_GROUP))
    with pool_process(SAMPLES_A_GROUP, steps) as pool:
        trainer = Trainer(pool.client("trainer"))
        loads = [spawn("--role", "through", pool.url, str(number), "16") for number in range(NUM_LOADS)]
        run_together(loads)
        began_s, step, early_mb = time.monotonic(), 1, 0.0
        while step <= steps:
            trainer.beat()
            if trainer.train(step):
                if step == max(2, steps // 4):
                    early_mb = memory_mb(pool.pid, "VmRSS")
                step += 1
        wall_s = time.monotonic() - began_s
        rss_mb, late_mb = memory_mb(pool.pid, "VmHWM"), memory_mb(pool.pid, "VmRSS")
        for load in loads:
            result_of(load)
        pool.process.kill()
        pool.process.wait()
        store_mb = pool.store_mb()
        killed_s = time.monotonic()
        pool.start()
        trainer.client.get_bytes("/v1/status", 30.0, deadline_s=60.0)
        reopen_s = time.monotonic() - killed_s
        pool.process.kill()
        pool.process.wait()
        report = read_audit(pool.root / "store")
        assert report.ok and report.open == 0, report
        num_done = report.consumed + sum(report.discarded.values())
    return Million(num_done, wall_s, rss_mb, late_mb - early_mb, store_mb, reopen_s)


# --- reports ------------------------------------------------------------------------------------------------------


def report_streams(load_s: float, profile: str) -> float:
    streams = measure_streams(load_s, profile)
    emit("tokens_per_cpu_s", streams.per_cpu_s, "tokens/s", ">= 1e6", ok=streams.per_cpu_s >= TARGET_PER_CPU_S,
         reference=f"pool CPU {streams.cpu_s:.2f} s, {streams.tokens} tokens durable")  # fmt: skip
    per_s = streams.tokens / load_s
    emit("tokens_per_s", per_s, "tokens/s", "as sent", ok=streams.tokens / streams.wall_s >= 0.85e6,
         reference=f"slowest append {1000 * streams.slowest_s:.0f} ms")  # fmt: skip
    for name, values in (("lease_p99_ms", streams.leases), ("command_p99_ms", streams.commands)):
        worst = 1000 * p99(values)
        middle = 1000 * sorted(values)[len(values) // 2]
        emit(name, worst, "ms", "< 50", ok=worst < TARGET_P99_MS, reference=f"{len(values)} calls, median {middle:.1f}")
    return streams.per_cpu_s


def report_redis(load_s: float, ours: float) -> None:
    redis = measure_redis(load_s)
    if isinstance(redis, str):
        emit("tokens_vs_redis_streams", None, "ratio", "beside", ok=False, reference=redis)
        return
    emit("tokens_vs_redis_streams", ours / redis[0] if ours else None, "ratio", "beside", ok=True,
         reference=f"redis-server, AOF always: {redis[0]:.0f} tokens per CPU s, {redis[1]:.0f} tokens/s")  # fmt: skip


def report_million(num: int) -> None:
    done = measure_million(num)
    scale = "" if num >= 1_000_000 else f"; {done.num} trajectories, not 1,000,000"
    text = f"{done.num / done.wall_s:.0f} trajectories/s, {done.growth_mb:.0f} MB more than after a quarter{scale}"
    emit("rss_mb_1m", done.rss_mb, "MiB", "<= 300", ok=done.rss_mb <= TARGET_RSS_MB, reference=text)
    emit("store_mb_1m", done.store_mb, "MiB", "bounded by retention", ok=True, reference=scale.lstrip("; "))
    emit("reopen_s", done.reopen_s, "s", "< 10", ok=done.reopen_s < TARGET_REOPEN_S,
         reference=f"kill -9 to the first answer, interpreter included{scale}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 s of streams, a tenth of the trajectories")
    parser.add_argument("--only", choices=("streams", "redis", "million"), help="one part")
    parser.add_argument("--profile", default="", metavar="FILE", help="perf record of the pool under the streams")
    parser.add_argument("--role", nargs="+", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    load_s, redis_s, num = (10.0, 5.0, 100_000) if options.quick else (30.0, 30.0, 1_000_000)
    match options.role:
        case ["load", url, number, seconds]:
            asyncio.run(stream_load(url, int(number), float(seconds)))
        case ["probe", url, seconds]:
            probe(url, float(seconds))
        case ["redis", port, number, seconds]:
            asyncio.run(redis_load(int(port), int(number), float(seconds)))
        case ["through", url, number, replicas]:
            asyncio.run(through_load(url, int(number), int(replicas)))
        case _:
            ours = report_streams(load_s, options.profile) if options.only in (None, "streams") else 0.0
            if options.only in (None, "redis"):
                report_redis(redis_s, ours)
            if options.only in (None, "million"):
                report_million(num)


if __name__ == "__main__":
    main()
