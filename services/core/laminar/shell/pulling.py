"""Engine side of the TCP hand-off: copies a version from a relay into this process's own memory, verified.

For machines where a descriptor cannot be passed, and for engines whose own relay is dead.
"""

from __future__ import annotations

import mmap
import time
from types import TracebackType
from typing import Self

from laminar.shell.handoff import SlotReused, ask_version
from laminar.shell.handover import PURPOSE
from laminar.shell.transport import (
    SILENCE_S,
    BadPeer,
    Conn,
    Refusal,
    connect,
    prove_as_client,
    recv_message,
    send_message,
)
from laminar.wire.links import (
    CHUNK_HEADER,
    FRAME_ABORT,
    SMALL_MESSAGE_BYTES,
    Hello,
    LinkKind,
    Welcome,
)
from laminar.wire.manifest import Manifest, ManifestError, verify_chunk

CONNECT_S = 1.0
"""For connecting and for the proof: what a relay costs that is dead while its socket lives on for its next life."""


class PulledWeights:
    """One version in own memory: every chunk has the announced hash. The same calls as `WeightsMap`.

    Life: pull -> tensor()... -> close(); a context manager. Views of it must not be used after `close`.
    """

    def __init__(self, memory: mmap.mmap, manifest: Manifest) -> None:
        self.manifest = manifest
        self._memory = memory
        self._data = memoryview(memory)
        self._entries = {entry.name: entry for entry in manifest.tensors}

    def tensor(self, name: str) -> memoryview:
        """The bytes of one tensor. Raises KeyError."""
        entry = self._entries[name]
        return self._data[entry.offset : entry.offset + entry.nbytes]

    def check(self) -> None:
        """Nobody else can change it."""

    def verify(self) -> None:
        """Hashes every byte against the manifest. Raises ManifestError if they differ."""
        for index in range(self.manifest.num_chunks):
            start, end = self.manifest.chunk_range(index)
            with self._data[start:end] as chunk:
                verify_chunk(self.manifest, index, chunk)

    def close(self) -> None:
        """Gives the memory back. May be called twice."""
        self._data.release()
        try:
            self._memory.close()
        except BufferError:
            # A caller still has a view: the memory goes with the last of them.
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def pull_version(
    address: str, token: str, job_uid: str, version: int | None, deadline_s: float = SILENCE_S
) -> PulledWeights:
    """Copies `version` (None: the newest) from the relay whose chain listener is at `address`.

    A version that has not come yet is waited for up to `deadline_s`, which bounds every silence after that as well.
    Raises VersionGone, SlotReused if it was dropped while it was copied, PeerLost if the relay is lost, BadPeer if
    what arrives is not what was announced.
    """
    until = time.monotonic() + deadline_s
    conn = connect(address, min(CONNECT_S, deadline_s))
    try:
        prove_as_client(conn, token, job_uid, PURPOSE, CONNECT_S)
        send_message(conn, Hello(kind=LinkKind.PULL, slot="engine"))
        recv_message(conn, Welcome, SMALL_MESSAGE_BYTES)
        manifest, _ = ask_version(conn, version, until)
        memory = mmap.mmap(-1, manifest.total_bytes)
        try:
            _receive(conn, manifest, memory)
        except BaseException:
            memory.close()
            raise
        return PulledWeights(memory, manifest)
    finally:
        conn.close()


def _receive(conn: Conn, manifest: Manifest, memory: mmap.mmap) -> None:
    header = bytearray(CHUNK_HEADER.size)
    with memoryview(memory) as whole:
        for index in range(manifest.num_chunks):
            conn.recv_into(memoryview(header), SILENCE_S)
            start, end = manifest.chunk_range(index)
            got, num_bytes = CHUNK_HEADER.unpack(header)
            if (got, num_bytes) == (FRAME_ABORT, 0):
                raise SlotReused(f"version {manifest.version}: {conn.peer} dropped it for a newer one")
            if (got, num_bytes) != (index, end - start):
                raise BadPeer(Refusal.MALFORMED, f"{conn.peer} sent chunk {got} of {num_bytes} bytes, not {index}")
            with whole[start:end] as chunk:
                conn.recv_into(chunk, SILENCE_S)
                try:
                    verify_chunk(manifest, index, chunk)
                except ManifestError as error:
                    raise BadPeer(Refusal.DAMAGED, str(error)) from error
