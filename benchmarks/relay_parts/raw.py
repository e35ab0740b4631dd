"""What plain sockets can do here: the floor that relays are measured against. No protocol, no checks, no faults."""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import xxhash
from relay_parts.nodes import ANSWER_S, FORK

from laminar.shell.process import die_with_parent


def fill(sock: socket.socket, view: memoryview) -> None:
    while view:
        got = sock.recv_into(view)
        assert got, "the other side has gone"
        view = view[got:]


def _stage(
    pipe: Connection,
    source: socket.socket,
    sink: tuple[str, int] | None,
    num_bytes: int,
    hashes: bool,
) -> None:
    """One process: a round a message of the pipe, which names the chunk size. Takes `num_bytes` into memory, hashes
    and passes on each chunk, then tells when it was done and what CPU time that took."""
    die_with_parent()
    onward = None
    memory = memoryview(mmap.mmap(-1, num_bytes))
    if sink is not None:
        onward = socket.create_connection(sink)
        onward.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    pipe.send(None)
    upstream, _ = source.accept()
    while (chunk_bytes := pipe.recv()) is not None:
        began_s = time.process_time()
        for start in range(0, num_bytes, chunk_bytes):
            chunk = memory[start : start + chunk_bytes]
            fill(upstream, chunk)
            if hashes:
                xxhash.xxh3_128_digest(chunk)
            if onward is not None:
                onward.sendall(chunk)
        pipe.send((time.monotonic(), time.process_time() - began_s))
    os._exit(0)


class Pump:
    """`num_stages` processes in a row, the last only receives; fed from here."""

    def __init__(self, num_stages: int, num_bytes: int, *, hashes: bool) -> None:
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_stages)]
        self._pipes: list[Connection] = []
        self._processes = []
        for index in reversed(range(num_stages)):
            last = index + 1 == num_stages
            sink = None if last else self._listeners[index + 1].getsockname()
            ours, theirs = FORK.Pipe()
            arguments = (theirs, self._listeners[index], sink, num_bytes, hashes)
            process = FORK.Process(target=_stage, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.insert(0, ours)
            self._processes.append(process)
            ours.recv()
        self._socket = socket.create_connection(self._listeners[0].getsockname())
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, buffer: memoryview, chunk_bytes: int) -> tuple[float, list[float]]:
        """Seconds until the last stage has it all, and the CPU seconds of each stage."""
        for pipe in self._pipes:
            pipe.send(chunk_bytes)
        began_s = time.monotonic()
        for start in range(0, len(buffer), chunk_bytes):
            self._socket.sendall(buffer[start : start + chunk_bytes])
        answers = []
        for pipe in self._pipes:
            assert pipe.poll(ANSWER_S)
            answers.append(pipe.recv())
        return answers[-1][0] - began_s, [cpu_s for _, cpu_s in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        self._socket.close()
        for process in self._processes:
            process.join(20)
        for listener in self._listeners:
            listener.close()


@contextmanager
def pump(num_stages: int, num_bytes: int, *, hashes: bool) -> Iterator[Pump]:
    made = Pump(num_stages, num_bytes, hashes=hashes)
    try:
        yield made
    finally:
        made.close()
