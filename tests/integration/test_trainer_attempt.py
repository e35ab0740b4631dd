"""Whole attempts: the real agent, torchrun and ranks, against a small pool and master in this process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from laminar.core.groups import slice_groups
from laminar.shell.handover import PURPOSE
from laminar.shell.process import descendants, process_alive
from laminar.shell.settings import Common
from laminar.shell.transport import SocketConn, Waker, listen_tcp, prove_as_listener, recv_message, send_message
from laminar.trainer.failures import EXIT_CRASH, EXIT_INPUT, EXIT_SUPERSEDED
from laminar.wire.codec import encode, pack_logprobs, pack_tokens
from laminar.wire.dataplane import BatchGroup, BatchSample, BatchSlice
from laminar.wire.links import (
    CHUNK_HEADER,
    MANIFEST_MESSAGE_BYTES,
    SMALL_MESSAGE_BYTES,
    Announce,
    Answer,
    Hello,
    LinkVerdict,
    OfferVerdict,
    Stored,
    Welcome,
)
from laminar.wire.manifest import Manifest

FOLDER = Path(__file__).parent.parent / "data" / "grpo_reference"
TOKEN, UID = "token", "uid-1"
WAIT_S = 120.0
LEARNING_RATE = 5e-5
"""AdamW moves a weight whose true gradient is 0 (a key's bias) by up to this much on rounding noise alone, which two
ranks do not share with one: it bounds how closely they can agree."""
NUM_STEPS = 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def wait_until(condition: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
    ends_s = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < ends_s, f"not within {wait_s} s: {what}"
        time.sleep(0.02)


class Master:
    """A master relay on the real transport; calls back with each version that it stored."""

    def __init__(self, on_stored: Callable[[Manifest, bytes], None]) -> None:
        self._on_stored = on_stored
        self._listener = listen_tcp(socket.create_server(("127.0.0.1", 0)))
        self.address = self._listener.address
        self._stop = Waker()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._listener.close()
        self._stop.close()

    def _serve(self) -> None:
        while (conn := self._listener.accept(self._stop)) is not None:
            self._receive(conn)
            conn.close()

    def _receive(self, conn: SocketConn) -> None:
        prove_as_listener(conn, TOKEN, UID, PURPOSE)
        recv_message(conn, Hello, SMALL_MESSAGE_BYTES)
        send_message(conn, Welcome(verdict=LinkVerdict.ACCEPTED, current=1, held=[]))
        manifest = recv_message(conn, Announce, MANIFEST_MESSAGE_BYTES).manifest
        if manifest is None:
            return  # it only asked how to cut the next version
        send_message(conn, Answer(verdict=OfferVerdict.SEND))
        data = bytearray(manifest.total_bytes)
        for index in range(manifest.num_chunks):
            conn.recv_into(memoryview(bytearray(CHUNK_HEADER.size)), WAIT_S)
            start, end = manifest.chunk_range(index)
            conn.recv_into(memoryview(data)[start:end], WAIT_S)
        self._on_stored(manifest, bytes(data))
        send_message(conn, Stored(version=manifest.version, digest=manifest.digest))


class Pool:
    """The trainer's side of the pool's API, in memory: sealed batches, versions, commits, checkpoints."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.batches = [recorded_groups(step) for step in range(num_steps)]
        self.hold_after = num_steps + 1
        """`take` answers WAIT for later steps."""
        self.stop_after = num_steps + 1
        """`take` answers STOP for later steps."""
        self.attempt = 0
        self.num_takes = 0
        self.begun: list[tuple[int, int]] = []
        self.commits: list[tuple[int, int, dict[str, float]]] = []
        self.reserved: list[tuple[int, int | None]] = []
        self.stored: dict[int, bytes] = {}
        self.checkpoints: list[dict[str, Any]] = []
        self.heartbeats: list[dict[str, Any]] = []
        self.lock = threading.Condition()
        self.master = Master(self._on_stored)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self.master.close()

    def answer(self, path: str, query: dict[str, str], body: dict[str, Any]) -> dict[str, Any] | bytes:
        with self.lock:
            if int(query.get("attempt") or body.get("attempt") or self.attempt) < self.attempt:
                raise PermissionError(f"attempt {self.attempt} trains")
            name, _, rest = path.removeprefix("/v1/").removeprefix("trainer/").partition("/")
            return getattr(self, f"_{name}")(body, query, rest)

    def _register(self, body: dict[str, Any], *_: object) -> dict[str, Any]:
        self.attempt = max(self.attempt, body["attempt"])
        return {"incarnation": self.attempt, "generation": 1}

    def _heartbeat(self, body: dict[str, Any], *_: object) -> dict[str, Any]:
        self.heartbeats.append(body)
        return {}

    def _resume(self, *_: object) -> dict[str, Any]:
        return {"checkpoint": self.checkpoints[-1] if self.checkpoints else None, "kept": self.checkpoints}

    def _begin(self, body: dict[str, Any], *_: object) -> dict[str, Any]:
        self.attempt = max(self.attempt, body["attempt"])
        self.begun.append((body["attempt"], body["restored_step"]))
        return {"restored_version": None, "steps": self.num_steps}

    def _reserve(self, body: dict[str, Any], *_: object) -> dict[str, Any]:
        self.reserved.append((body["step"], body["parent"]))
        return {"version": len(self.reserved) - 1, "epoch": 1, "master": self.master.address}

    def _publication(self, _: object, query: dict[str, str], version: str) -> dict[str, Any]:
        self.lock.wait_for(lambda: int(version) in self.stored, float(query["wait_s"]))
        return {
            "version": int(version), "visible": int(version) in self.stored, "complete_on": [], "needed": 1,
            "epoch": 1, "master": self.master.address,
        }  # fmt: skip

    def _take(self, body: dict[str, Any], *_: object) -> dict[str, Any]:
        self.num_takes += 1
        if body["step"] > self.stop_after:
            return {"status": "stop"}
        if body["step"] > self.hold_after:
            self.lock.wait(0.1)
            return {"status": "wait"}
        return {"status": "batch" if body["step"] <= self.num_steps else "done"}

    def _slice(self, _: object, query: dict[str, str], *__: object) -> bytes:
        step, rank, world = int(query["step"]), int(query["rank"]), int(query["world"])
        groups = self.batches[step - 1]
        sizes = [sum(len(sample.tokens) for sample in group.samples) for group in groups]
        mine = [groups[index] for index in slice_groups(sizes, world)[rank]]
        return encode(
            BatchSlice(
                step=step, rank=rank, world=world, groups=mine, num_groups_total=len(groups),
                num_samples_total=sum(len(group.samples) for group in groups),
            )
        )  # fmt: skip

    def _commit(self, body: dict[str, Any], *_: object) -> dict[str, Any]:
        self.commits.append((body["attempt"], body["step"], body["stats"]))
        return {"ok": True}

    def _ledger(self, *_: object) -> bytes:
        return b"ledger"

    def _checkpoint(self, body: dict[str, Any], *_: object) -> dict[str, Any]:
        self.checkpoints.append(body["checkpoint"])
        return {"kept": self.checkpoints, "removable": []}

    def _on_stored(self, manifest: Manifest, data: bytes) -> None:
        with self.lock:
            self.stored[manifest.version] = data
            self.lock.notify_all()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        pool = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.reply({})

            def do_POST(self) -> None:
                self.reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def reply(self, body: dict[str, Any]) -> None:
                assert self.headers["authorization"] == f"Bearer {TOKEN}"
                parts = urlsplit(self.path)
                try:
                    status, answer = 200, pool.answer(parts.path, dict(parse_qsl(parts.query)), body)
                except PermissionError as error:
                    status, answer = 409, {"error": "attempt", "detail": str(error)}
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except ConnectionError:
                    self.close_connection = True  # the caller was killed

            def log_message(self, format: str, *args: object) -> None:
                return

        return Handler


def recorded_groups(step: int) -> list[BatchGroup]:
    stored = np.load(FOLDER / "reference_batch.npz")
    groups: list[BatchGroup] = []
    for number in range(5 * (step % 3), 5 * (step % 3) + 5):
        samples: list[BatchSample] = []
        rows = np.flatnonzero(stored["group"] == number)
        for row in rows:
            tokens = stored["completion_ids"][row][stored["completion_mask"][row] == 1].tolist()
            samples.append(
                BatchSample(
                    id=f"0/{number}/{row}", version=0, step=0, tokens=pack_tokens(tokens), finish_reason="stop",
                    logprobs=pack_logprobs(stored["old_logprobs"][row][: len(tokens)].tolist()),
                    reward=float(stored["rewards"][row]),
                )
            )  # fmt: skip
        prompt = stored["prompt_ids"][rows[0]][stored["prompt_mask"][rows[0]] == 1].tolist()
        groups.append(BatchGroup(group=f"0/{number}", prompt_tokens=pack_tokens(prompt), samples=samples))
    return groups


class AgentProcess:
    """`python -m laminar.trainer` with its environment, log and descendants."""

    def __init__(self, pool: Pool, folder: Path, *, attempt: int = 1, replicas: int = 1, model: Path | None = None):
        (folder / "slot").mkdir(parents=True, exist_ok=True)
        (folder / "checkpoints").mkdir(exist_ok=True)
        spec = {
            "metadata": {"name": "job"},
            "spec": {
                "steps": pool.num_steps,
                "model": {"source": f"file:{model or FOLDER / 'reference_model'}"},
                "data": {"train": {"source": "file:/nowhere.jsonl"}},
                "rewards": [{"name": "answer", "type": "exact"}],
                "algorithm": {"learningRate": LEARNING_RATE, "promptsPerStep": 5, "samplesPerPrompt": 8},
                "trainer": {"replicas": replicas, "checkpoint": {"everySteps": 2}},
            },
        }
        (folder / "job.json").write_text(json.dumps(spec))
        common = Common(
            job="job", job_uid=UID, token=TOKEN, spec_path=folder / "job.json", generation=1, pool_url=pool.url,
            slot="trainer-0", life=attempt, listen="127.0.0.1:0", dir=folder / "slot",
        )  # fmt: skip
        environment = os.environ | common.to_env() | {
            "LAMINAR_ATTEMPT": str(attempt),
            "LAMINAR_CHECKPOINTS": str(folder / "checkpoints"),
            "LAMINAR_MODEL_OUT": str(folder / "model"),
        }  # fmt: skip
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.log_path = folder / f"log-{attempt}"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "laminar.trainer"], env=environment, stdout=log, stderr=log
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait(self) -> int:
        try:
            return self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the agent did not end:\n{self.log}") from None

    def pids(self, word: str) -> list[int]:
        found = descendants(self.process.pid)
        return [pid for pid in found if word in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")]

    def ranks(self) -> list[int]:
        return [pid for pid in self.pids("laminar.trainer.rank") if pid not in self.pids("torch.distributed.run")]


class Stage:
    """What a test starts; everything is gone afterwards."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pools: list[Pool] = []
        self._agents: list[AgentProcess] = []

    def pool(self, num_steps: int) -> Pool:
        self._pools.append(Pool(num_steps))
        return self._pools[-1]

    def agent(self, pool: Pool, name: str = "run", **options: Any) -> AgentProcess:
        self._agents.append(AgentProcess(pool, self._folder / name, **options))
        return self._agents[-1]

    def close(self) -> None:
        for agent in self._agents:
            if agent.process.poll() is None:
                agent.process.kill()
                agent.process.wait()
        for pool in self._pools:
            pool.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


def model_of(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pool, Path]]:
    """One rank, four steps, nothing in its way: the pool's books and the run's folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    stage = Stage(folder)
    pool = stage.pool(NUM_STEPS)
    agent = stage.agent(pool)
    assert agent.wait() == 0, agent.log
    yield pool, folder / "run"
    stage.close()


def test_every_step_is_committed_published_and_checkpointed_in_order(undisturbed: tuple[Pool, Path]) -> None:
    pool, folder = undisturbed
    assert [step for _, step, _ in pool.commits] == [1, 2, 3, 4]
    assert pool.reserved == [(0, None), (1, 0), (2, 1), (3, 2), (4, 3)]
    assert len(set(pool.stored.values())) == 5, "each update changes the published bytes"
    assert [checkpoint["step"] for checkpoint in pool.checkpoints] == [2, 4]
    assert pool.heartbeats and pool.heartbeats[0]["slot"] == "trainer-0"
    assert model_of(folder)["model.embed_tokens.weight"].tobytes() == pool.stored[4][: 304 * 128 * 4]


def test_one_rank_and_two_train_the_same_model(stage: Stage, tmp_path: Path, undisturbed: tuple[Pool, Path]) -> None:
    pool = stage.pool(NUM_STEPS)
    agent = stage.agent(pool, replicas=2)
    assert agent.wait() == 0, agent.log
    one, two = model_of(undisturbed[1]), model_of(tmp_path / "run")
    assert one.keys() == two.keys()
    assert max(float(np.abs(one[name] - two[name]).max()) for name in one) <= 1e-6
    for name in ("loss", "grad_norm", "reward_mean", "clip_fraction"):
        for (_, _, first), (_, _, second) in zip(undisturbed[0].commits, pool.commits, strict=True):
            assert first[name] == pytest.approx(second[name], abs=1e-6)


def test_an_attempt_that_resumes_ends_with_the_model_of_the_undisturbed_run(
    stage: Stage, tmp_path: Path, undisturbed: tuple[Pool, Path]
) -> None:
    pool = stage.pool(NUM_STEPS)
    pool.stop_after = 2
    assert stage.agent(pool).wait() == 0
    assert not (tmp_path / "run" / "model").exists()
    pool.stop_after = NUM_STEPS + 1
    assert stage.agent(pool, attempt=2).wait() == 0
    assert pool.begun == [(1, 0), (2, 2)]
    assert [(attempt, step) for attempt, step, _ in pool.commits] == [(1, 1), (1, 2), (2, 3), (2, 4)]
    assert pool.stored[3] == pool.stored[2], "the restored weights are published before the first batch"
    expected, found = model_of(undisturbed[1]), model_of(tmp_path / "run")
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_killed_launcher_leaves_no_rank_behind(stage: Stage) -> None:
    pool = stage.pool(1)
    pool.hold_after = 0
    agent = stage.agent(pool, replicas=2)
    wait_until(lambda: bool(pool.begun), "the attempt has begun")
    ranks = agent.ranks()
    assert len(ranks) == 2
    os.kill(agent.pids("torch.distributed.run")[0], signal.SIGKILL)
    assert agent.wait() == 128 + signal.SIGKILL
    wait_until(lambda: not any(process_alive(pid) for pid in ranks), "the ranks are gone")


def test_a_killed_rank_ends_the_whole_group(stage: Stage) -> None:
    pool = stage.pool(1)
    pool.hold_after = 0
    agent = stage.agent(pool, replicas=2)
    wait_until(lambda: bool(pool.begun), "the attempt has begun")
    everyone = agent.pids("laminar.trainer")
    os.kill(agent.ranks()[1], signal.SIGKILL)
    assert agent.wait() != 0
    assert not any(process_alive(pid) for pid in everyone)


def test_a_stopped_rank_ends_the_whole_group_with_a_reason_while_one_that_wakes_up_in_time_goes_on(
    stage: Stage,
) -> None:
    pool = stage.pool(1)
    pool.hold_after = 0
    agent = stage.agent(pool, replicas=2)
    wait_until(lambda: bool(pool.begun), "the attempt has begun")
    everyone, sleeper = agent.pids("laminar.trainer"), agent.ranks()[1]
    os.kill(sleeper, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        agent.process.wait(8)
    os.kill(sleeper, signal.SIGCONT)
    takes = pool.num_takes
    wait_until(lambda: pool.num_takes > takes + 60, "both ranks go on")
    os.kill(sleeper, signal.SIGSTOP)
    assert agent.wait() == EXIT_CRASH, agent.log
    assert f"error: The trainer's ranks hung and were killed: process {sleeper} of the group" in agent.log
    assert not any(process_alive(pid) for pid in everyone)


def test_a_killed_agent_takes_the_group_with_it(stage: Stage) -> None:
    pool = stage.pool(1)
    pool.hold_after = 0
    agent = stage.agent(pool)
    wait_until(lambda: bool(pool.begun), "the attempt has begun")
    everyone = agent.pids("laminar.trainer")
    assert len(everyone) == 2
    agent.process.kill()
    agent.wait()
    wait_until(lambda: not any(process_alive(pid) for pid in everyone), "launcher and rank are gone", 10)


def test_sigterm_finishes_the_step_checkpoints_and_exits_with_0(stage: Stage) -> None:
    pool = stage.pool(3)
    pool.hold_after = 1
    agent = stage.agent(pool)
    wait_until(lambda: len(pool.commits) == 1, "the first step is committed")
    agent.process.terminate()
    assert agent.wait() == 0, agent.log
    assert [checkpoint["step"] for checkpoint in pool.checkpoints] == [1]


def test_a_superseded_attempt_ends_with_its_own_exit_code_and_one_clear_line(stage: Stage) -> None:
    pool = stage.pool(1)
    pool.hold_after = 0
    agent = stage.agent(pool)
    wait_until(lambda: bool(pool.begun), "the attempt has begun")
    pool.attempt = 2
    assert agent.wait() == EXIT_SUPERSEDED, agent.log
    assert re.search(r"^error: Trainer attempt 1 is superseded: .*attempt 2 trains", agent.log, re.MULTILINE), agent.log


def test_a_missing_model_is_one_paragraph_and_exit_code_2(stage: Stage, tmp_path: Path) -> None:
    agent = stage.agent(stage.pool(1), model=tmp_path / "nothing")
    assert agent.wait() == EXIT_INPUT
    assert f"error: The model folder {tmp_path / 'nothing'} does not exist" in agent.log
    assert "Traceback" not in agent.log


def test_the_agent_never_imports_torch() -> None:
    code = "import sys, laminar.trainer.__main__; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_batches_survive_the_wire() -> None:
    groups = recorded_groups(0)
    assert msgspec.msgpack.decode(encode(groups[0]), type=BatchGroup) == groups[0]
