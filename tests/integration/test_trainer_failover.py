"""A master relay, a real process, dies or falls asleep under a publication: the next one has the bytes in a moment."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from laminar.shell.process import child_environment
from laminar.shell.settings import Common
from laminar.trainer.books import Books
from laminar.trainer.publish import Publisher, Sender
from laminar.wire.manifest import layout
from laminar.wire.messages import PublicationView, ReservedVersion

TOKEN, UID = "token", "uid-1"
NUM_BYTES = 32 << 20
WAIT_S = 30.0
POLL = threading.Event()

pytestmark = pytest.mark.timeout(180)


def until(what: str, condition: Callable[[], Any]) -> Any:
    ends_s = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < ends_s, f"not within {WAIT_S} s: {what}"
        POLL.wait(0.005)
    return value


class Registry(BaseHTTPRequestHandler):
    """All that a relay asks of a pool."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        answers = {"/v1/register": {"incarnation": 1, "generation": 1}, "/v1/heartbeat": {"newest": None}}
        data = json.dumps(answers.get(self.path, {"ok": True})).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        return


class Relay:
    """A relay process whose listening sockets this process keeps, as the local driver does."""

    def __init__(self, index: int, folder: Path, pool_url: str) -> None:
        self.slot = f"relay-{index}"
        self._http, self._data = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
        self.address = f"127.0.0.1:{self._data.getsockname()[1]}"
        common = Common(
            job="job", job_uid=UID, token=TOKEN, spec_path=folder / "job.json", generation=1, pool_url=pool_url,
            slot=self.slot, life=1, listen=f"fd:{self._http.fileno()}", dir=folder, machine=self.slot,
        )  # fmt: skip
        environment = child_environment(
            **common.to_env(), LAMINAR_DATA_LISTEN=f"fd:{self._data.fileno()}", LAMINAR_HANDOFF=str(folder / self.slot)
        )
        fds = (self._http.fileno(), self._data.fileno())
        self.process = subprocess.Popen([sys.executable, "-m", "laminar.relay"], env=environment, pass_fds=fds)

    def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {TOKEN}", "laminar-job": UID, "content-type": "application/json"}
        url = f"http://127.0.0.1:{self._http.getsockname()[1]}{path}"
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=WAIT_S) as answer:
            return json.load(answer)

    def lead(self, epoch: int, *followers: Relay) -> None:
        members = [{"slot": relay.slot, "address": relay.address, "machine": ""} for relay in (self, *followers)]
        for relay in (self, *followers):
            relay.call("/v1/epoch", {"epoch": epoch, "members": members})

    def holds(self, version: int) -> bool:
        return any(item["version"] == version for item in self.call("/v1/relay")["held"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._http.close()
        self._data.close()


class Register(Books):
    """The version register that publisher and lookout ask; `turn` names another master."""

    def __init__(self, master: str) -> None:
        self._route = (1, master)
        self._turned = threading.Condition()
        self.num_reserved = 0

    def __enter__(self) -> Register:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def turn(self, master: str) -> None:
        with self._turned:
            self._route = (self._route[0] + 1, master)
            self._turned.notify_all()

    def reserve(self, step: int, parent: int | None) -> ReservedVersion:
        self.num_reserved += 1
        return ReservedVersion(version=self.num_reserved - 1, epoch=self._route[0], master=self._route[1])

    def publication(self, version: int, epoch: int, wait_s: float) -> PublicationView:
        with self._turned:
            self._turned.wait_for(lambda: self._route[0] != epoch, wait_s)
            return PublicationView(
                version=version, visible=False, complete_on=[], needed=2, epoch=self._route[0], master=self._route[1]
            )


@pytest.fixture
def relays(tmp_path: Path) -> Iterator[list[Relay]]:
    spec = {
        "steps": 1,
        "model": {"source": "file:/m"},
        "data": {"train": {"source": "file:/d"}},
        "rewards": [{"name": "r", "type": "exact"}],
    }
    (tmp_path / "job.json").write_text(json.dumps({"metadata": {"name": "job"}, "spec": spec}))
    pool = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    pool.daemon_threads = True
    thread = threading.Thread(target=pool.serve_forever, args=(0.05,))
    thread.start()
    made = [Relay(index, tmp_path, f"http://127.0.0.1:{pool.server_port}") for index in range(2)]
    made[0].lead(1, made[1])
    yield made
    for relay in made:
        relay.close()
    pool.shutdown()
    thread.join()
    pool.server_close()


@pytest.fixture
def register(relays: list[Relay]) -> Register:
    return Register(relays[0].address)


@pytest.fixture
def publisher(register: Register) -> Iterator[Publisher]:
    made = Publisher(lambda: register, Sender(UID, TOKEN, 1), layout([("weight", "U8", (NUM_BYTES,))]), None)
    yield made
    made.close()


def publish(publisher: Publisher, step: int) -> None:
    buffer = publisher.buffer()
    buffer[:] = bytes([step + 1]) * NUM_BYTES
    publisher.submit(step, buffer)


def undisturbed_s(publisher: Publisher, relays: list[Relay]) -> float:
    """Of one publication to two relays, on this machine as busy as it is."""
    started_s = time.monotonic()
    publish(publisher, 0)
    until("both relays hold version 0", lambda: all(relay.holds(0) for relay in relays))
    return time.monotonic() - started_s


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_bytes_for_a_master_that_does_not_answer_go_to_the_next_one_as_soon_as_it_is_known(
    blow: signal.Signals, relays: list[Relay], register: Register, publisher: Publisher
) -> None:
    usual_s = undisturbed_s(publisher, relays)
    os.kill(relays[0].process.pid, blow)
    publish(publisher, 1)
    # The address still takes connections: the kernel accepts them for whoever holds the listening socket. So the
    # publisher, which turns to it next, waits for an answer.
    until("version 1 is reserved", lambda: register.num_reserved == 2)
    relays[1].lead(2)
    register.turn(relays[1].address)
    turned_s = time.monotonic()
    until("the next master holds version 1", lambda: relays[1].holds(1))
    assert time.monotonic() - turned_s < 1.0 + 2 * usual_s


def test_a_hand_over_under_way_to_a_master_that_falls_asleep_goes_on_with_the_next_one(
    relays: list[Relay], register: Register, publisher: Publisher
) -> None:
    usual_s = undisturbed_s(publisher, relays)
    publish(publisher, 1)
    os.kill(relays[0].process.pid, signal.SIGSTOP)
    relays[1].lead(2)
    register.turn(relays[1].address)
    turned_s = time.monotonic()
    until("the next master holds version 1", lambda: relays[1].holds(1))
    assert time.monotonic() - turned_s < 1.0 + 2 * usual_s
