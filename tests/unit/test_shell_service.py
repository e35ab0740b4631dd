"""One service process of the shared shell, as its callers, its driver and its operator see it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from laminar.shell.blocking import BlockingClient
from laminar.shell.calls import (
    Conflict,
    Malformed,
    OldGeneration,
    Refused,
    Superseded,
    Unauthorized,
    Unknown,
    Unreachable,
)
from laminar.shell.client import PoolClient
from laminar.shell.member import Member
from laminar.shell.settings import Common
from laminar.shell.sockets import bound_address, listening_socket
from laminar.wire.dataplane import Command, CommandKind, LeaseCall, LeaseKind, LeaseReply
from laminar.wire.messages import Ack, ChainEpoch, Heartbeat, MemberState, Register, Registered, Role, Take, TakeReply

START_S = 30.0

SERVICE = """
import asyncio, os, time
from laminar.shell.service import MsgpackResponse, Refusal, Service, msgpack_body, start
from laminar.shell.logs import fields
from laminar.wire.codec import frame
from laminar.wire.dataplane import Command, CommandKind, LeaseCall, LeaseKind, LeaseReply
from laminar.wire.messages import *
from fastapi import Request, Response

async def main(common):
    service = Service(common, title="toy", version="0", body_limit_bytes=100_000)
    note = common.dir / "notes"
    nonces = {}

    def write(line):
        with note.open("a") as file:
            file.write(line + "\\n")

    @service.router.post("/epoch")
    async def epoch(body: ChainEpoch) -> Ack:
        if body.epoch < 5:
            raise Refusal(409, "epoch", "epoch 5 is in force", current=5)
        return Ack()

    @service.router.post("/register")
    async def register(body: Register) -> Registered:
        nonces.setdefault(body.nonce, len(nonces) + 1)
        return Registered(incarnation=nonces[body.nonce], generation=common.generation)

    @service.router.post("/heartbeat")
    async def heartbeat(body: Heartbeat) -> HeartbeatReply:
        if body.incarnation < len(nonces):
            raise Refusal(410, "superseded", "gone", current=len(nonces))
        return HeartbeatReply(newest=7)

    @service.router.post("/lease")
    async def lease(request: Request) -> Response:
        call = await msgpack_body(request, LeaseCall, 1000)
        write("waiting")
        await service.wait(asyncio.Event().wait(), call.wait_s, request)
        write("waited")
        return MsgpackResponse(LeaseReply(kind=LeaseKind.WAIT, version=call.version))

    @service.router.get("/commands/{slot}")
    async def commands(slot: str) -> Response:
        async def frames():
            write("stream opened")
            try:
                yield frame(Command(kind=CommandKind.HELLO, reason=slot))
                await asyncio.Event().wait()
            finally:
                write("stream closed")
        return service.push(frames(), "application/msgpack")

    @service.router.get("/lines")
    async def lines() -> Response:
        async def three():
            for index in range(3):
                yield Registered(incarnation=index, generation=1).model_dump_json().encode() + b"\\n"
        return service.push(three(), "application/x-ndjson")

    @service.router.get("/busy")
    async def busy() -> Ack:
        nonces["busy"] = nonces.get("busy", 0) + 1
        if nonces["busy"] < 3:
            raise Refusal(503, "starting", "call again")
        del nonces["busy"]
        return Ack()

    @service.router.post("/hang_loop")
    async def hang_loop() -> Ack:
        service.watch("writer", 0.05)
        return Ack()

    @service.router.post("/unhang_loop")
    async def unhang_loop() -> Ack:
        service.unwatch("writer")
        return Ack()

    @service.router.post("/bug")
    async def bug() -> Ack:
        raise ZeroDivisionError("a bug")

    @service.router.get("/blob")
    async def blob(size: int) -> Response:
        return Response(b"x" * size)

    async def loop():
        if "FAIL_LOOP" in os.environ:
            raise RuntimeError("the loop broke")
        await service.stopping.wait()
        await service.drained.wait()
        write("flushed")

    service.set_ready(True)
    write("ready")
    return await service.run(loop())

start(main)
"""


class Toy:
    """A service process on an inherited listening socket."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.folder = folder
        (folder / "toy.py").write_text(SERVICE)
        self.socket = listening_socket("127.0.0.1:0")
        self.address = bound_address(self.socket)
        self.common = Common(
            job="toy", job_uid="uid-1", token="secret", spec_path=folder / "job.json", generation=3,
            pool_url=f"http://{self.address}", slot="toy-0", life=1, listen=f"fd:{self.socket.fileno()}", dir=folder,
        )  # fmt: skip
        self.process = self.spawn(**environ)

    def spawn(self, **environ: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(self.folder / "toy.py")], env={**os.environ, **self.common.to_env(), **environ},
                pass_fds=[self.socket.fileno()], stderr=log,
            )  # fmt: skip

    def notes(self) -> list[str]:
        path = self.folder / "notes"
        return path.read_text().split("\n") if path.exists() else []

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def blocking(self, **changes: object) -> BlockingClient:
        arguments = {"token": "secret", "job_uid": "uid-1", "generation": 3, "name": "test", **changes}
        return BlockingClient(f"http://{self.address}", **arguments)  # type: ignore[arg-type]

    def client(self) -> PoolClient:
        return PoolClient(f"http://{self.address}", "secret", "uid-1", 3, "test")

    def probe(self, path: str) -> tuple[int, bytes]:
        host, _, port = self.address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=START_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()


def eventually(condition: Callable[[], bool], deadline_s: float = START_S) -> None:
    ends_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends_s, "the condition did not become true"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toy]:
    toy = Toy(tmp_path_factory.mktemp("toy"))
    assert toy.probe("/readyz")[0] == 200, toy.log()
    yield toy
    toy.close()


@pytest.fixture
def own_toy(tmp_path: Path) -> Iterator[Toy]:
    toy = Toy(tmp_path)
    assert toy.probe("/readyz")[0] == 200, toy.log()
    yield toy
    toy.close()


def test_a_message_is_answered_and_a_refusal_says_what_is_in_force(toy: Toy) -> None:
    with toy.blocking() as client:
        assert client.post_json("/v1/epoch", ChainEpoch(epoch=5, members=[]), Ack, START_S).ok
        with pytest.raises(Conflict) as refused:
            client.post_json("/v1/epoch", ChainEpoch(epoch=4, members=[]), Ack)
    assert (refused.value.error, refused.value.current) == ("epoch", 5)


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"token": "other"}, Unauthorized, "unauthorized"),
        ({"job_uid": "uid-2"}, Conflict, "job"),
        ({"generation": 2}, OldGeneration, "generation"),
    ],
)
def test_a_stranger_is_refused_with_the_word_of_what_is_wrong(
    toy: Toy, changes: dict[str, object], error: type[Refused], word: str
) -> None:
    with toy.blocking(**changes) as client, pytest.raises(error) as refused:
        client.get_json("/v1/busy", Ack, START_S)
    assert refused.value.error == word


def test_a_service_of_an_older_generation_is_asked_again_until_it_is_replaced(toy: Toy) -> None:
    with toy.blocking(generation=4) as client, pytest.raises(Unreachable, match="this is generation 3"):
        client.get_json("/v1/busy", Ack, START_S, deadline_s=1.0)


def test_a_caller_who_does_not_know_the_generation_yet_is_heard(toy: Toy) -> None:
    with toy.blocking(generation=None) as client:
        assert client.get_json("/v1/busy", Ack, START_S).ok


def test_wrong_messages_and_paths_get_their_own_errors(toy: Toy) -> None:
    with toy.blocking() as client:
        with pytest.raises(Malformed, match=r"body\.epoch"):
            client.post_json("/v1/epoch", Take(attempt=1, step=2), Ack, START_S)
        with pytest.raises(Malformed):
            client.post_msgpack("/v1/lease", Command(kind=CommandKind.PING), LeaseReply)
        with pytest.raises(Unknown):
            client.get_json("/v1/nowhere", TakeReply)


def test_a_body_above_the_limit_is_refused_before_it_is_kept(toy: Toy) -> None:
    with toy.blocking() as client:
        with pytest.raises(Refused) as data:
            client.post_msgpack("/v1/lease", LeaseCall(slot="x" * 2000, incarnation=1, version=1, max_running=1), Ack)  # type: ignore[type-var]
        assert data.value.status == 413
        with pytest.raises(Refused) as control:
            client.post_json("/v1/epoch", Problemless(epoch="x" * 200_000), Ack)
        assert control.value.status == 413


class Problemless(Ack):
    epoch: str


def test_busy_answers_are_asked_again_by_both_clients(toy: Toy) -> None:
    with toy.blocking() as client:
        assert client.get_json("/v1/busy", Ack, START_S).ok

    async def asynchronous() -> Ack:
        async with toy.client() as client:
            return await client.get_json("/v1/busy", Ack)

    assert asyncio.run(asynchronous()).ok


def test_both_clients_give_up_at_the_deadline(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but nobody listens: connections are refused
        url = f"http://{bound_address(closed)}"
        with BlockingClient(url, "t", "u", 1, "test") as client, pytest.raises(Unreachable):
            client.get_json("/v1/busy", Ack, deadline_s=0.2)

        async def asynchronous() -> None:
            async with PoolClient(url, "t", "u", 1, "test", random.Random(1)) as client:
                await client.get_json("/v1/busy", Ack, deadline_s=0.2)

        with pytest.raises(Unreachable):
            asyncio.run(asynchronous())


def test_a_server_that_never_answers_is_left_at_the_timeout() -> None:
    with listening_socket("127.0.0.1:0") as silent:
        with BlockingClient(f"http://{bound_address(silent)}", "t", "u", 1, "test") as client:
            began_s = time.monotonic()
            with pytest.raises(Unreachable, match=r"timed out|TimeoutError"):
                client.get_bytes("/v1/blob", timeout_s=0.1, deadline_s=0.3)
            assert time.monotonic() - began_s < 5


def test_an_aborted_call_ends_while_it_waits_to_try_again() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        client = BlockingClient(f"http://{bound_address(closed)}", "t", "u", 1, "test")
        raised: list[BaseException] = []

        def call() -> None:
            try:
                client.get_json("/v1/busy", Ack)
            except Unreachable as error:
                raised.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        client.abort()
        thread.join(timeout=START_S)
        assert len(raised) == 1


def test_large_answers_arrive_whole(toy: Toy) -> None:
    with toy.blocking() as client:
        assert len(client.get_bytes("/v1/blob", START_S, params={"size": 3_000_001})) == 3_000_001


def test_a_long_poll_ends_when_its_time_is_over(toy: Toy) -> None:
    with toy.blocking() as client:
        call = LeaseCall(slot="r", incarnation=1, version=4, max_running=1, wait_s=0.05)
        assert client.post_msgpack("/v1/lease", call, LeaseReply, START_S) == LeaseReply(kind=LeaseKind.WAIT, version=4)


def test_a_long_poll_of_a_caller_that_went_away_ends_at_once(own_toy: Toy) -> None:
    call = LeaseCall(slot="r", incarnation=1, version=4, max_running=1, wait_s=1000)
    with own_toy.blocking() as client:
        client.get_bytes("/v1/blob", START_S, params={"size": 1})
        with pytest.raises(Unreachable):
            client.post_msgpack("/v1/lease", call, LeaseReply, 0.3, deadline_s=0.3)
    eventually(lambda: "waited" in own_toy.notes(), 5)


def test_the_end_of_a_streams_caller_is_seen_at_once(own_toy: Toy) -> None:
    async def first() -> Command:
        async with own_toy.client() as client:
            frames = client.stream_frames("/v1/commands/rollout-1", Command, params={"incarnation": 1})
            command = await anext(frames)
            assert "stream closed" not in own_toy.notes()
            await frames.aclose()  # type: ignore[attr-defined]
            return command

    assert asyncio.run(first()) == Command(kind=CommandKind.HELLO, reason="rollout-1")
    eventually(lambda: "stream closed" in own_toy.notes(), 5)


def test_json_lines_are_read_to_the_clean_end(toy: Toy) -> None:
    async def read() -> list[int]:
        async with toy.client() as client:
            return [line.incarnation async for line in client.stream_json_lines("/v1/lines", Registered)]

    assert asyncio.run(read()) == [0, 1, 2]


def test_a_silent_stream_is_unreachable_and_a_refused_one_is_refused(toy: Toy) -> None:
    async def read(path: str) -> None:
        async with toy.client() as client:
            async for _ in client.stream_frames(path, Command, idle_s=0.3):
                pass

    with pytest.raises(Unreachable):
        asyncio.run(read("/v1/commands/x"))
    with pytest.raises(Unknown):
        asyncio.run(read("/v1/nowhere"))


def test_sigterm_ends_streams_and_long_polls_and_lets_the_loops_flush(own_toy: Toy) -> None:
    async def scene() -> tuple[list[Command], LeaseReply]:
        async with own_toy.client() as client:
            call = LeaseCall(slot="r", incarnation=1, version=4, max_running=1, wait_s=1000)
            frames = client.stream_frames("/v1/commands/r", Command, idle_s=START_S)
            got = [await anext(frames)]
            poll = asyncio.create_task(client.post_msgpack("/v1/lease", call, LeaseReply, 1000))
            await asyncio.to_thread(eventually, lambda: "waiting" in own_toy.notes())
            own_toy.process.send_signal(signal.SIGTERM)
            got += [command async for command in frames]
            return got, await poll

    began_s = time.monotonic()
    commands, reply = asyncio.run(scene())
    assert [command.kind for command in commands] == [CommandKind.HELLO]
    assert reply.kind is LeaseKind.WAIT
    assert own_toy.process.wait(START_S) == 0
    assert own_toy.notes()[-2] == "flushed"
    assert time.monotonic() - began_s < 10


def test_calls_queue_on_the_inherited_socket_while_the_service_restarts(own_toy: Toy) -> None:
    assert own_toy.probe("/readyz")[0] == 200
    own_toy.process.send_signal(signal.SIGTERM)
    assert own_toy.process.wait(START_S) == 0
    own_toy.process = own_toy.spawn()
    assert own_toy.probe("/readyz") == (200, b'{"ready":true,"reason":""}')


def test_a_client_rides_out_a_killed_service(own_toy: Toy) -> None:
    with own_toy.blocking() as client:
        assert client.get_json("/v1/busy", Ack, START_S).ok
        own_toy.process.kill()
        own_toy.process.wait()
        own_toy.process = own_toy.spawn()
        assert client.get_json("/v1/busy", Ack, START_S).ok


def test_a_loop_that_fails_ends_the_process_with_its_traceback(tmp_path: Path) -> None:
    toy = Toy(tmp_path, FAIL_LOOP="1")
    try:
        assert toy.process.wait(START_S) == 1
        assert "RuntimeError: the loop broke" in toy.log()
    finally:
        toy.close()


def test_a_bug_in_a_handler_ends_the_process_with_its_traceback(own_toy: Toy) -> None:
    with own_toy.blocking() as client:
        client.get_json("/v1/busy", Ack, START_S)
        with pytest.raises(Unreachable):
            client.post_json("/v1/bug", Ack(), Ack, deadline_s=1.0)
    assert own_toy.process.wait(START_S) == 1
    assert "ZeroDivisionError: a bug" in own_toy.log()


def test_health_names_the_loop_that_stands_still(toy: Toy) -> None:
    assert toy.probe("/healthz")[0] == 200
    with toy.blocking() as client:
        client.post_json("/v1/hang_loop", Ack(), Ack)
        eventually(lambda: toy.probe("/healthz")[0] == 503, 5)
        assert json.loads(toy.probe("/healthz")[1])["stuck"] == ["writer"]
        client.post_json("/v1/unhang_loop", Ack(), Ack)
    assert toy.probe("/healthz")[0] == 200


def test_metrics_need_no_token_and_tell_of_the_process_and_the_loop(toy: Toy) -> None:
    text = toy.probe("/metrics")[1].decode()
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"):
        assert f"\n{name} " in text
    assert "\nlaminar_loop_lag_seconds " in text


def test_every_join_is_a_new_incarnation_and_the_old_ones_heartbeat_is_superseded(own_toy: Toy) -> None:
    def beat(member: Member) -> Heartbeat:
        return Heartbeat(slot="rollout-0", incarnation=member.incarnation, state=MemberState.IDLE)

    async def scene() -> int:
        async with own_toy.client() as client:
            register = Register(slot="rollout-0", role=Role.ROLLOUT, index=0, life=1, nonce="")
            old, new = Member(client, register), Member(client, register)
            assert await old.join() == 1
            assert await new.join() == 2
            assert client.generation == 3
            until = asyncio.Event()

            def last_beat() -> Heartbeat:
                until.set()
                return beat(new)

            await new.heartbeat_loop(last_beat, until=until)
            with pytest.raises(Superseded) as error:
                await old.heartbeat_loop(lambda: beat(old))
            assert error.value.current == 2
            return new.newest or 0

    assert asyncio.run(scene()) == 7


def test_an_idle_service_uses_less_than_two_percent_of_a_core(own_toy: Toy) -> None:
    own_toy.probe("/readyz")

    def cpu_s() -> float:
        line = Path(f"/proc/{own_toy.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(line[11]) + int(line[12])) / os.sysconf("SC_CLK_TCK")

    began_s, before_s = time.monotonic(), cpu_s()
    time.sleep(3)  # the measurement itself: CPU time per wall time
    assert (cpu_s() - before_s) / (time.monotonic() - began_s) < 0.02


def test_wrong_settings_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(SERVICE)
    environ = {**os.environ, "LAMINAR_POOL_URL": "http://h:1"}
    done = subprocess.run([sys.executable, tmp_path / "toy.py"], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: the environment variable LAMINAR_JOB is not set\n")


def test_a_taken_port_is_one_line_and_exit_code_2(own_toy: Toy) -> None:
    common = replace(own_toy.common, listen=own_toy.address)
    environ = {**os.environ, **common.to_env()}
    done = subprocess.run([sys.executable, own_toy.folder / "toy.py"], env=environ, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: cannot listen on '{own_toy.address}': Address already in use"


def test_the_shell_for_ranks_imports_no_server() -> None:
    heavy = ("fastapi", "aiohttp", "uvicorn", "torch", "yaml")
    code = f"import sys, laminar.shell.blocking; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
