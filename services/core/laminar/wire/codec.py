"""Packing of token and log-prob arrays, and MessagePack encoding of data-plane messages."""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable
from typing import TypeVar

import msgspec

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """int32, little-endian. Raises OverflowError for ids that do not fit."""
    values = array.array("i", tokens)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpack_tokens(data: bytes | bytearray) -> list[int]:
    """Inverse of `pack_tokens`. Raises ValueError if the length is not a multiple of 4."""
    values = array.array("i")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """float32, little-endian."""
    values = array.array("f", logprobs)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpack_logprobs(data: bytes | bytearray) -> list[float]:
    """Inverse of `pack_logprobs` (to float32 precision). Raises ValueError if the length is not a multiple of 4."""
    values = array.array("f")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def num_items(data: bytes) -> int:
    """Number of 4-byte items in a packed array."""
    return len(data) // 4


def encode(message: msgspec.Struct) -> bytes:
    """MessagePack bytes of a data-plane message."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview, type_: type[T]) -> T:
    """Raises msgspec.ValidationError (a ValueError) with the path of what does not fit."""
    return msgspec.msgpack.decode(data, type=type_)


def frame(message: msgspec.Struct) -> bytes:
    """A length-prefixed (uint32 little-endian) message for streams."""
    body = encode(message)
    return len(body).to_bytes(4, "little") + body
