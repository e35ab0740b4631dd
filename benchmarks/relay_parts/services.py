"""Whole relay services (`python -m laminar.relay`), the pool's part of their protocol, and the driver's policy.

Here the report of a lost relay takes its real way: neighbour -> heartbeat -> pool -> plan of the next list -> every
relay's HTTP API.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from relay_parts.lines import Line, at_most, listed, median
from relay_parts.nodes import TOKEN, UID, Weights, until

from laminar.core.chain import ChainNode, RelayView, plan_chain
from laminar.core.identity import Incarnation, Version
from laminar.core.lost_relays import LostRelays, Neighbourhood
from laminar.shell.handover import hand_over
from laminar.shell.process import child_environment
from laminar.shell.settings import Common

SETTLE_S = 10.0
JOB = {
    "apiVersion": "laminar.dev/v1alpha1", "kind": "LaminarJob", "metadata": {"name": "bench"},
    "spec": {
        "steps": 1, "model": {"source": "file:/m"}, "data": {"train": {"source": "file:/d"}},
        "rewards": [{"name": "r", "type": "exact"}],
    },
}  # fmt: skip
KEEP_VERSIONS = 2
"""The job's default."""


class Pool:
    """Answers registrations, heartbeats and completions; `news` is set by each heartbeat."""

    def __init__(self) -> None:
        self.members: dict[str, dict[str, Any]] = {}
        self.beats: dict[str, tuple[float, dict[str, Any]]] = {}
        self.news = threading.Event()
        self._lock = threading.Lock()
        pool = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                data = json.dumps(pool.answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                try:
                    self.wfile.write(data)
                except BrokenPipeError:
                    self.close_connection = True  # it was killed while it asked

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if path == "/v1/register":
                self.members[body["slot"]] = {**body, "incarnation": len(self.members) + 1}
                return {"incarnation": len(self.members), "generation": 1}
            if path == "/v1/heartbeat":
                self.beats[body["slot"]] = (time.monotonic(), body)
                self.news.set()
                return {"newest": None}
            return {"ok": True}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Service:
    """One relay process."""

    def __init__(self, index: int, folder: Path, pool: Pool) -> None:
        self.slot = f"relay-{index}"
        self._http = socket.create_server(("127.0.0.1", 0))
        self._data = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._data.getsockname()[1]}"
        common = Common(
            job="bench", job_uid=UID, token=TOKEN, spec_path=folder / "job.json", generation=1, pool_url=pool.url,
            slot=self.slot, life=1, listen=f"fd:{self._http.fileno()}", dir=folder, machine=f"m-{index}",
        )  # fmt: skip
        environment = child_environment(
            **common.to_env(), LAMINAR_DATA_LISTEN=f"fd:{self._data.fileno()}",
            LAMINAR_HANDOFF=str(folder / f"{self.slot}.sock"),
        )  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "laminar.relay"], env=environment, stderr=subprocess.DEVNULL,
            pass_fds=(self._http.fileno(), self._data.fileno()),
        )  # fmt: skip

    def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {TOKEN}", "laminar-job": UID, "content-type": "application/json"}
        url = f"http://127.0.0.1:{self._http.getsockname()[1]}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=SETTLE_S) as response:
            return json.load(response)

    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) << 10

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(20) == 0, f"{self.slot} ended with {self.process.returncode}"
        self._http.close()
        self._data.close()


class Driver:
    """Plans the next list from what the pool hears, as `laminar run` does, and tells it to every member at once."""

    def __init__(self, pool: Pool, services: Sequence[Service]) -> None:
        self._pool = pool
        self._services = {service.slot: service for service in services}
        self._lost = LostRelays()
        self.epoch = 0
        self.chain: tuple[ChainNode, ...] = ()

    def turn(self) -> bool:
        """True: there is a new list, and every member has taken it."""
        now_s = time.monotonic()
        said = [
            Neighbourhood(
                slot,
                int(self._pool.members[slot]["incarnation"]),
                beat.get("epoch"),
                tuple(beat.get("lost_neighbours", ())),
                now_s - at_s,
            )
            for slot, (at_s, beat) in sorted(self._pool.beats.items())
            if slot in self._pool.members
        ]
        self._lost.observe(now_s, self.chain, self.epoch, said)
        ready = [
            RelayView(
                slot, Incarnation(member["incarnation"]), member["data_address"], member["machine"], _newest(beat)
            )
            for slot, member in sorted(self._pool.members.items())
            if (beat := self._pool.beats.get(slot)) is not None
            and not self._lost.is_lost(slot, member["incarnation"], now_s)
        ]
        planned = plan_chain(self.chain, ready, self._lost.apart(now_s))
        if planned is None:
            return False
        self.chain, self.epoch = planned, self.epoch + 1
        members = [{"slot": node.slot, "address": node.address} for node in planned]
        message = {"epoch": self.epoch, "members": members}
        with ThreadPoolExecutor(len(planned)) as threads:
            list(threads.map(lambda node: self._services[node.slot].call("/v1/epoch", message), planned))
        return True


def _newest(beat: tuple[float, dict[str, Any]]) -> Version | None:
    version = beat[1].get("version")
    return None if version is None else Version(version)


@contextmanager
def services(folder: Path, num: int) -> Iterator[tuple[Pool, list[Service]]]:
    """`num` relays that have joined the pool."""
    (folder / "job.json").write_text(json.dumps(JOB))
    pool = Pool()
    started: list[Service] = []
    try:
        started += [Service(index, folder, pool) for index in range(num)]
        until(lambda: len(pool.beats) == num, 60)
        yield pool, started
    finally:
        for service in started:
            service.close()
        pool.close()


def next_epoch(folder: Path, *, quick: bool) -> Iterator[Line]:
    """From SIGKILL of a middle relay until every other one acts on a list without it."""
    repeats = 1 if quick else 5
    took: list[float] = []
    with services(folder, 2 + repeats) as (pool, started):
        driver = Driver(pool, started)
        assert driver.turn()
        weights = Weights(8 << 20)
        manifest, buffer = weights.next(1 << 20)
        hand_over(driver.chain[0].address, TOKEN, UID, 1, manifest, buffer)
        for _ in range(repeats):
            until(lambda: all(service.call("/v1/relay")["held"] for service in started))
            victim = next(service for service in started if service.slot == driver.chain[1].slot)
            pool.news.clear()
            killed_s = time.monotonic()
            victim.process.kill()
            while not driver.turn():
                assert pool.news.wait(SETTLE_S), "nobody reports the loss"
                pool.news.clear()
            assert victim.slot not in {node.slot for node in driver.chain}
            took.append(time.monotonic() - killed_s)
            victim.process.wait()
            started.remove(victim)
            victim.close()
            del pool.members[victim.slot], pool.beats[victim.slot]
    yield at_most(
        "epoch_s", median(took), "s", 1.0, f"each {listed(took)}; whole services, of {len(took) + 2} to 2 members"
    )


def memory(folder: Path, *, quick: bool) -> Iterator[Line]:
    """The most that a relay process ever had resident, its slots included."""
    weights = Weights((768 if quick else 1024) << 20)
    with services(folder, 1) as (pool, (relay,)):
        Driver(pool, [relay]).turn()
        before_bytes = relay.peak_bytes()
        for _ in range(KEEP_VERSIONS + (1 if quick else 3)):
            manifest, buffer = weights.next(16 << 20)
            hand_over(relay.address, TOKEN, UID, 1, manifest, buffer)
        ratio = relay.peak_bytes() / weights.num_bytes
    share = before_bytes / (1 << 20)
    limit = KEEP_VERSIONS + 1.1
    size = weights.num_bytes >> 20
    reference = f"keepVersions {KEEP_VERSIONS}, {size} MiB of weights; the process without any: {share:.0f} MiB"
    yield at_most("memory_ratio", ratio, "x weights", limit, reference)
