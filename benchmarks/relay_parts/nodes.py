"""Relay processes (data plane only) and the trainer's and driver's parts, for measurements of one host.

Nodes are forked before any thread exists here, so that sixteen of them start in a moment. A node obeys one command at
a time, sent over a pipe; all clocks are CLOCK_MONOTONIC, which the processes of a host share.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from relay_parts.links import Interface, LinkSpeed

from laminar.relay.plane import DataPlane
from laminar.relay.serving import Credentials
from laminar.relay.store import StoreSizes
from laminar.shell.process import die_with_parent
from laminar.shell.transport import Dial, connect, listen_tcp, listen_unix
from laminar.wire.manifest import Manifest, layout, make_manifest
from laminar.wire.messages import ChainEpoch, ChainMember

TOKEN, UID = "token", "bench"
ANSWER_S = 60.0
SAMPLE_S = 0.001
CLONE_NEWNET = 0x40000000
FORK = multiprocessing.get_context("fork")


def set_namespace(fd: int) -> None:
    """Moves this thread, and those that it will start, into the network namespace of an open file."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


@dataclass(frozen=True)
class Site:
    """Where a process runs: its address, and its network namespace if it has one of its own."""

    address: str = "127.0.0.1"
    namespace: str | None = None

    def enter(self) -> None:
        if self.namespace is not None:
            with open(f"/var/run/netns/{self.namespace}") as file:
                set_namespace(file.fileno())


class _Node:
    """Inside the process."""

    def __init__(self, pipe: Connection, slot: str, handoff: str, site: Site, speed: LinkSpeed | None) -> None:
        self._pipe = pipe
        self._complete: dict[int, float] = {}
        self._arrivals: list[tuple[float, int]] = []
        self._changed = threading.Condition()
        self._watching = threading.Event()
        self._watcher: threading.Thread | None = None
        listener = listen_tcp(socket.create_server((site.address, 0)))
        dial: Dial = connect if speed is None else Interface(speed).dial
        sizes = StoreSizes(keep_versions=2)
        self._plane = DataPlane(
            slot, Credentials(TOKEN, UID), sizes, listener, listen_unix(handoff), self._notice, dial
        )  # fmt: skip
        self._plane.start()
        pipe.send(listener.address)

    def run(self) -> None:
        while (command := self._pipe.recv()) is not None:
            name, *arguments = command
            answer = getattr(self, name)(*arguments)
            assert self._plane.failure is None, self._plane.failure
            self._pipe.send(answer)
        self._plane.close()

    def _notice(self) -> None:
        now_s = time.monotonic()
        held = [item.version for item in self._plane.view().held]
        with self._changed:
            for version in held:
                self._complete.setdefault(version, now_s)
            self._changed.notify_all()

    # Commands.

    def epoch(self, message: dict[str, Any]) -> None:
        self._plane.apply_epoch(ChainEpoch.model_validate(message))

    def completed(self, version: int) -> float:
        with self._changed:
            assert self._changed.wait_for(lambda: version in self._complete, ANSWER_S), f"no version {version}"
            return self._complete[version]

    def cpu_s(self) -> float:
        return time.process_time()

    def lost(self) -> tuple[str, ...]:
        return self._plane.view().lost_neighbours

    def watch(self) -> None:
        """Notes when bytes arrive, until `arrivals`."""
        self._arrivals = []
        self._watching.set()
        self._watcher = threading.Thread(target=self._look)
        self._watcher.start()

    def _look(self) -> None:
        before = self._plane.view().counters.received_bytes
        while self._watching.is_set():
            now = self._plane.view().counters.received_bytes
            if now != before:
                before = now
                self._arrivals.append((time.monotonic(), now))
            time.sleep(SAMPLE_S)

    def arrivals(self) -> list[float]:
        """When bytes arrived since `watch`."""
        self._watching.clear()
        assert self._watcher is not None
        self._watcher.join()
        return [at_s for at_s, _ in self._arrivals]

    def num_arrivals(self) -> int:
        """So far, since `watch`."""
        return len(self._arrivals)


def _node_main(pipe: Connection, slot: str, handoff: str, site: Site, speed: LinkSpeed | None) -> None:
    die_with_parent()
    logging.disable(logging.WARNING)
    site.enter()
    _Node(pipe, slot, handoff, site, speed).run()
    os._exit(0)


class Node:
    """One relay process, as seen from here."""

    def __init__(self, index: int, folder: Path, site: Site, speed: LinkSpeed | None) -> None:
        self.slot = f"relay-{index}"
        self.handoff = str(folder / f"{self.slot}.sock")
        self._pipe, theirs = FORK.Pipe()
        arguments = (theirs, self.slot, self.handoff, site, speed)
        self._process = FORK.Process(target=_node_main, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.address = str(self._pipe.recv())
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._stopped = False

    def ask(self, name: str, *arguments: Any) -> Any:
        self.tell(name, *arguments)
        return self.answer()

    def tell(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, *arguments))

    def answer(self) -> Any:
        assert self._pipe.poll(ANSWER_S), f"{self.slot} does not answer"
        return self._pipe.recv()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.join()

    def stop(self) -> None:
        self._stopped = True
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        self._stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        if self._stopped:
            self.go_on()
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(20)
            assert self._process.exitcode == 0, f"{self.slot} ends with {self._process.exitcode}"
        self._pipe.close()


class Chain:
    """Nodes and the lists that they get."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = list(nodes)
        self.members: list[Node] = []
        self._epoch = 0

    def join(self, members: Sequence[Node], tell: Sequence[Node] | None = None) -> None:
        """A new list. Returns when all in `tell` (None: all of them) have it."""
        self._epoch += 1
        self.members = list(members)
        listed = [ChainMember(slot=node.slot, address=node.address) for node in members]
        message = ChainEpoch(epoch=self._epoch, members=listed).model_dump()
        heard = self.members if tell is None else tell
        for node in heard:
            node.tell("epoch", message)
        for node in heard:
            node.answer()

    def completed(self, version: int) -> list[float]:
        """When each member held it whole."""
        for node in self.members:
            node.tell("completed", version)
        return [node.answer() for node in self.members]

    def cpu_s(self) -> float:
        """Of all members and of this process."""
        return time.process_time() + sum(node.ask("cpu_s") for node in self.members)


@contextmanager
def relays(
    folder: Path, num: int, speed: LinkSpeed | None = None, sites: Sequence[Site] | None = None
) -> Iterator[Chain]:
    """`num` relay processes without a list yet; ended at the end."""
    assert threading.active_count() == 1, "processes are forked before threads are started"
    where = sites or [Site()] * num
    nodes = [Node(index, folder, site, speed) for index, site in zip(range(num), where, strict=True)]
    try:
        yield Chain(nodes)
    finally:
        for node in nodes:
            node.close()


class Weights:
    """The bytes of all versions: every version is the same noise, shifted, so that no two are equal."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.version = 0
        assert num_bytes % (1 << 20) == 0, num_bytes
        self._buffer = bytearray(os.urandom(1 << 20)) * (num_bytes >> 20)

    def next(self, chunk_bytes: int) -> tuple[Manifest, memoryview]:
        """The next version, cut into chunks."""
        self.version += 1
        self._buffer[:8] = self.version.to_bytes(8, "little")
        manifest = make_manifest(
            job_uid=UID, version=self.version, step=self.version, attempt=1, buffer=self._buffer,
            tensors=layout([("w", "U8", (self.num_bytes,))]), chunk_bytes=chunk_bytes,
        )  # fmt: skip
        return manifest, memoryview(self._buffer)


def until(condition: Callable[[], bool], wait_s: float = 30.0) -> None:
    ends_s = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < ends_s, "the condition did not come true in time"
        time.sleep(0.002)
