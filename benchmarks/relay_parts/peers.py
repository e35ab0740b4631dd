"""What somebody would use instead of relays: a Redis server, HTTP downloads, files. Readers are processes."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

import numpy
from relay_parts.hosts import inside
from relay_parts.nodes import ANSWER_S, FORK, Site, until
from relay_parts.raw import fill
from safetensors import safe_open
from safetensors.numpy import save_file

from laminar.shell.process import die_with_parent

REDIS_PORT = 26379
GLOO = Path(__file__).resolve().parents[1] / "peers" / "gloo_broadcast.py"


class Missing(Exception):
    """The peer is not installed here."""


# --- readers ------------------------------------------------------------------------------------------------------


def _read_redis(address: str, memory: memoryview) -> None:
    with socket.create_connection((address, REDIS_PORT)) as sock:
        sock.sendall(b"GET weights\r\n")
        head = b""
        while not head.endswith(b"\r\n"):
            head += sock.recv(1)
        assert int(head[1:]) == len(memory), head
        fill(sock, memory)


def _read_http(address: str, memory: memoryview) -> None:
    host, port = address.rsplit(":", 1)
    connection = HTTPConnection(host, int(port))
    connection.request("GET", "/")
    response = connection.getresponse()
    while memory:
        got = response.readinto(memory)
        assert got, "the server has gone"
        memory = memory[got:]
    connection.close()


def _read_file(path: str, memory: memoryview) -> None:
    with safe_open(path, framework="np") as file:
        weights = file.get_tensor("w")
        memory[:] = memoryview(weights).cast("B")


READ = {"redis": _read_redis, "http": _read_http, "files": _read_file}


def _reader(pipe: Connection, site: Site, num_bytes: int) -> None:
    die_with_parent()
    site.enter()
    memory = memoryview(mmap.mmap(-1, num_bytes))
    while (ask := pipe.recv()) is not None:
        kind, place = ask
        READ[kind](place, memory)
        pipe.send((time.monotonic(), bytes(memory[:8])))
    os._exit(0)


class Readers:
    """One process a host, each with its own memory for the weights."""

    def __init__(self, sites: Sequence[Site], num_bytes: int) -> None:
        self._pipes: list[Connection] = []
        self._processes = []
        for site in sites:
            ours, theirs = FORK.Pipe()
            process = FORK.Process(target=_reader, args=(theirs, site, num_bytes), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def read(self, kind: str, place: str, expected: bytes) -> float:
        """All at once; when the last has it all."""
        for pipe in self._pipes:
            pipe.send((kind, place))
        ended_s = 0.0
        for pipe in self._pipes:
            assert pipe.poll(ANSWER_S), "a reader does not answer"
            at_s, first = pipe.recv()
            assert first == expected, (kind, first, expected)
            ended_s = max(ended_s, at_s)
        return ended_s

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)


# --- sources: each publishes `buffer` and waits until all readers have it; seconds ---------------------------------


@contextmanager
def redis_server(site: Site, folder: Path) -> Iterator[None]:
    """Raises Missing."""
    program = shutil.which("redis-server")
    if program is None:
        raise Missing("redis-server is not installed (Debian: apt-get install redis-server)")
    command = [program, "--port", str(REDIS_PORT), "--bind", site.address, "--save", "", "--appendonly", "no"]
    command += ["--protected-mode", "no", "--dir", str(folder)]
    if site.namespace is not None:
        command = ["ip", "netns", "exec", site.namespace, *command]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with inside(site):
            until(lambda: _answers(site.address))
        yield
    finally:
        server.terminate()
        server.wait(20)


def _answers(address: str) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((address, REDIS_PORT)) == 0


def by_redis(site: Site, readers: Readers, buffer: memoryview) -> float:
    """The server runs beside the trainer; readers hear of the version the moment that it is there."""
    began_s = time.monotonic()
    with inside(site), socket.create_connection((site.address, REDIS_PORT)) as sock:
        sock.sendall(b"*3\r\n$3\r\nSET\r\n$7\r\nweights\r\n$%d\r\n" % len(buffer))
        sock.sendall(buffer)
        sock.sendall(b"\r\n")
        assert sock.recv(16).startswith(b"+OK")
    return readers.read("redis", site.address, bytes(buffer[:8])) - began_s


@contextmanager
def http_server(site: Site, buffer: memoryview) -> Iterator[str]:
    """host:port of a server that answers every request with `buffer`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(buffer)))
            self.end_headers()
            self.wfile.write(buffer)

        def log_message(self, format: str, *args: object) -> None:
            return

    with inside(site):
        server = ThreadingHTTPServer((site.address, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"{site.address}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def by_http(place: str, readers: Readers, buffer: memoryview) -> float:
    began_s = time.monotonic()
    return readers.read("http", place, bytes(buffer[:8])) - began_s


def by_files(folder: Path, readers: Readers, buffer: memoryview) -> float:
    """A folder that all share; in memory, so no disk slows it."""
    path = folder / "weights.safetensors"
    began_s = time.monotonic()
    save_file({"w": numpy.frombuffer(buffer, dtype=numpy.uint8)}, str(path))
    return readers.read("files", str(path), bytes(buffer[:8])) - began_s


class Gloo:
    """Ranks that get ready, which takes seconds, while something else is measured; the first site is the source."""

    def __init__(self, sites: Sequence[Site], num_bytes: int, repeats: int) -> None:
        places = json.dumps([[site.address, site.namespace] for site in sites])
        command = [sys.executable, str(GLOO), "--bytes", str(num_bytes), "--repeats", str(repeats), "--sites", places]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def run(self) -> list[float]:
        """Seconds of each broadcast."""
        out, _ = self._process.communicate("\n", 120)
        assert self._process.returncode == 0, "the ranks failed"
        return [float(each) for each in json.loads(out.splitlines()[-1])]
