"""Framed MessagePack between an agent and its children, over one end of an inherited socket pair.

A frame is a uint32 little-endian length and that many bytes. A child that dies closes its end, so the other side
reads the end of the stream at once: no poll, no timeout.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from laminar.wire.codec import frame

FRAME_LIMIT_BYTES = 256 * 2**20
"""A larger length means a broken stream, not a message: a lease of 512 responses of 32 k tokens stays below."""
_HEADER_BYTES = 4
_READ_BYTES = 2**18

Received = TypeVar("Received")


class ChannelClosed(ConnectionError):
    """The other side closed its end, or died."""


@dataclass(frozen=True, slots=True)
class SpawnedChild:
    """A child process and the agent's end of its channel."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


async def spawn_child(
    command: Sequence[str], environment: dict[str, str], *, own_process_group: bool = False
) -> SpawnedChild:
    """Starts `command` with one end of a socket pair; the descriptor's number is appended as its last argument."""
    ours, theirs = socket.socketpair()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            str(theirs.fileno()),
            pass_fds=(theirs.fileno(),),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=own_process_group,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    reader, writer = await asyncio.open_connection(sock=ours, limit=_READ_BYTES)
    return SpawnedChild(process, reader, writer)


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame's body. Raises ChannelClosed at the end of the stream, ValueError for an impossible length."""
    try:
        length = int.from_bytes(await reader.readexactly(_HEADER_BYTES), "little")
        if length > FRAME_LIMIT_BYTES:
            raise ValueError(f"frame length {length} is above the limit of {FRAME_LIMIT_BYTES}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise ChannelClosed("the child closed its channel") from error


class BlockingChannel(Generic[Received]):
    """The child's end: single-threaded, blocking sends."""

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[Received]) -> None:
        self._socket = connection
        self._decoder = decoder
        self._buffer = bytearray()

    @classmethod
    def inherited(cls, descriptor: int, decoder: msgspec.msgpack.Decoder[Received]) -> BlockingChannel[Received]:
        """Takes over a descriptor passed by `spawn_child`."""
        return cls(socket.socket(fileno=descriptor), decoder)

    def send(self, message: msgspec.Struct) -> None:
        """Blocks while the other side does not read. Raises ChannelClosed when it is gone."""
        try:
            self._socket.sendall(frame(message))
        except ConnectionError as error:
            raise ChannelClosed("the agent closed its channel") from error

    def receive(self) -> Received:
        """Waits for the next message; a child without work costs nothing here. Raises ChannelClosed at the end."""
        while (message := self._take()) is None:
            self._fill()
        return message

    def receive_ready(self, wait_s: float = 0.0) -> Received | None:
        """The next message; None if none arrives within `wait_s` (by default: has arrived)."""
        message = self._take()
        while message is None and select.select([self._socket], [], [], wait_s)[0]:
            self._fill()
            message = self._take()
        return message

    def _take(self) -> Received | None:
        if len(self._buffer) < _HEADER_BYTES:
            return None
        end = _HEADER_BYTES + int.from_bytes(self._buffer[:_HEADER_BYTES], "little")
        if end > FRAME_LIMIT_BYTES + _HEADER_BYTES:
            raise ValueError(f"frame length {end - _HEADER_BYTES} is above the limit of {FRAME_LIMIT_BYTES}")
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_HEADER_BYTES:end])
        del self._buffer[:end]
        return self._decoder.decode(body)

    def _fill(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except ConnectionError as error:
            raise ChannelClosed("the agent closed its channel") from error
        if not data:
            raise ChannelClosed("the agent closed its channel")
        self._buffer += data
