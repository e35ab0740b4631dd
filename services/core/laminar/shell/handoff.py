"""Engine side of the hand-off: maps a version that the machine's relay holds, read-only, without copying it.

The relay passes the descriptor of a sealed memfd over its unix socket. The open connection is the hold: while it is
open the relay uses another slot for new versions if it can. It may still reuse this one rather than let a reader
stall the trainer; `check` finds that out. Never use tensors for good before a `check` after the last read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import time
from types import TracebackType
from typing import Self

from laminar.shell.memory import prefer_huge_pages
from laminar.shell.transport import (
    SILENCE_S,
    BadPeer,
    Conn,
    PeerLost,
    Refusal,
    SocketConn,
    connect_unix,
    prove_as_client,
    recv_message,
    send_message,
)
from laminar.wire.links import MANIFEST_MESSAGE_BYTES, Opened, OpenVersion
from laminar.wire.manifest import Manifest, ManifestError, check_manifest, verify_chunk

PURPOSE = "handoff"
SLOT_HEADER_BYTES = 4096
"""First page of a slot: its generation (uint64, native order), which changes before its contents do."""
MAX_WAIT_S = 30.0
"""The longest that a relay keeps one request open."""


class VersionGone(Exception):
    """The relay has no such version (any more, or yet). `newest`: the newest that it holds; None: none."""

    def __init__(self, version: int | None, newest: int | None) -> None:
        wished = "any version" if version is None else f"version {version}"
        super().__init__(f"the relay does not hold {wished}; newest: {newest}")
        self.newest = newest


class SlotReused(Exception):
    """The mapped bytes may have changed, or the relay is gone: drop what was read."""


class WeightsMap:
    """One version, mapped read-only. Invariant: what was read before a successful `check` is this version's.

    Life: open -> tensor()... -> check() -> close(); a context manager. Views of it must not be used after `close`.
    """

    def __init__(self, conn: SocketConn, memory: mmap.mmap, manifest: Manifest, generation: int) -> None:
        self.manifest = manifest
        self._conn = conn
        self._memory = memory
        self._generation = generation
        self._whole = memoryview(memory)
        self._header = self._whole[:8].cast("Q")
        self._data = self._whole[SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + manifest.total_bytes]
        self._entries = {entry.name: entry for entry in manifest.tensors}

    def tensor(self, name: str) -> memoryview:
        """The bytes of one tensor, read-only. Raises KeyError."""
        entry = self._entries[name]
        return self._data[entry.offset : entry.offset + entry.nbytes]

    def check(self) -> None:
        """Raises SlotReused if the slot's contents changed since `open_version`, or the relay closed the connection."""
        if self._header[0] != self._generation:
            raise SlotReused(f"version {self.manifest.version}: its slot was taken for a newer one")
        poll = select.poll()
        poll.register(self._conn, select.POLLIN)
        if poll.poll(0):
            # The relay never writes after the descriptor: readable means closed.
            raise SlotReused(f"version {self.manifest.version}: the relay is gone")

    def verify(self) -> None:
        """Hashes every byte against the manifest. Raises SlotReused, or ManifestError if they differ."""
        for index in range(self.manifest.num_chunks):
            start, end = self.manifest.chunk_range(index)
            self.check()
            verify_chunk(self.manifest, index, self._data[start:end])
        self.check()

    def close(self) -> None:
        """Gives the hold back and drops the mapping. May be called twice."""
        self._conn.close()
        for view in (self._header, self._data, self._whole):
            view.release()
        try:
            self._memory.close()
        except BufferError:
            # A caller still has a view (say, a tensor on top of it): the mapping goes with the last of them.
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def ask_version(conn: Conn, version: int | None, until: float) -> tuple[Manifest, int]:
    """The manifest of `version` (None: the newest) and its slot's generation, from a relay that has proved itself.

    It is waited for until `until` (monotonic). Raises VersionGone, PeerLost, or BadPeer for a manifest that contradicts
    itself.
    """
    wait_s = min(MAX_WAIT_S, max(0.0, until - time.monotonic()))
    send_message(conn, OpenVersion(version=version, wait_s=wait_s))
    opened = recv_message(conn, Opened, MANIFEST_MESSAGE_BYTES, wait_s + SILENCE_S)
    if opened.manifest is None:
        raise VersionGone(version, None if opened.newest < 0 else opened.newest)
    try:
        check_manifest(opened.manifest)
    except ManifestError as error:
        raise BadPeer(Refusal.MALFORMED, str(error)) from error
    return opened.manifest, opened.generation


def open_version(
    socket_path: str, token: str, job_uid: str, version: int | None, deadline_s: float = SILENCE_S
) -> WeightsMap:
    """Maps `version` (None: the newest) of the relay at `socket_path`.

    A version that has not come yet is waited for up to `deadline_s`. Raises VersionGone if it does not come or is
    gone, PeerLost if the relay is not there or dies (the caller retries: it is being replaced).
    """
    until = time.monotonic() + deadline_s
    conn = connect_unix(socket_path, deadline_s)
    try:
        prove_as_client(conn, token, job_uid, PURPOSE)
        manifest, generation = ask_version(conn, version, until)
        return WeightsMap(conn, _map(conn, manifest), manifest, generation)
    except BaseException:
        conn.close()
        raise


def _map(conn: SocketConn, manifest: Manifest) -> mmap.mmap:
    conn.socket.settimeout(SILENCE_S)
    try:
        _, fds, _, _ = socket.recv_fds(conn.socket, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise PeerLost(f"{conn.peer}: {error}") from error
    if not fds:
        raise PeerLost(f"{conn.peer} closed the connection")
    try:
        needed_bytes = SLOT_HEADER_BYTES + manifest.total_bytes
        # A slot that cannot shrink cannot make its readers fault.
        cannot_shrink = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if os.fstat(fds[0]).st_size < needed_bytes or not cannot_shrink:
            raise BadPeer(Refusal.MALFORMED, f"{conn.peer} passed a descriptor that is no sealed slot")
        memory = mmap.mmap(fds[0], needed_bytes, access=mmap.ACCESS_READ)
        prefer_huge_pages(memory)
        return memory
    finally:
        os.close(fds[0])
