"""How long a chunk-pipelined broadcast along a chain takes, and the chunk size that makes it shortest.

p nodes (the source included), W bytes, T_b seconds per byte, T_s seconds per message. With k chunks the last node is
complete after (k + p - 2)(T_s + W T_b / k); the best k is sqrt((p - 2) W T_b / T_s), which gives T*(p).
"""

from __future__ import annotations

import math
from collections import deque

MIN_CHUNK_BYTES = 1 << 20
"""Below 1 MiB the cost of a message (two system calls, a wake-up, a hash set-up) shows on every link we measured."""
MAX_CHUNK_BYTES = 64 << 20
"""A lost or damaged chunk costs at most this much, and a hop adds at most this much latency."""

RECENT = 8
"""Measurements that count: a link that changed is known again after as many versions."""
FASTEST_BYTE_S = 1 / 50e9
"""No link of one host is faster than 400 Gbit/s; a shorter time says that the messages were quicker than measured."""


def best_num_chunks(num_nodes: int, weights_bytes: int, byte_s: float, message_s: float) -> float:
    """c* of the pipeline, at least 1; not rounded."""
    _check(num_nodes, weights_bytes, byte_s, message_s)
    if message_s == 0:
        return math.inf if num_nodes > 2 else 1.0
    return max(1.0, math.sqrt(max(num_nodes - 2, 0) * weights_bytes * byte_s / message_s))


def chunk_bytes(num_nodes: int, weights_bytes: int, byte_s: float, message_s: float) -> int:
    """clamp(W / c*, 1 MiB, 64 MiB)."""
    wished = weights_bytes / best_num_chunks(num_nodes, weights_bytes, byte_s, message_s)
    return max(MIN_CHUNK_BYTES, min(MAX_CHUNK_BYTES, math.ceil(wished)))


def pipeline_s(num_nodes: int, weights_bytes: int, byte_s: float, message_s: float, num_chunks: int) -> float:
    """Time until the last of `num_nodes` holds all, with `num_chunks` equal chunks. 0 for a chain of one."""
    _check(num_nodes, weights_bytes, byte_s, message_s)
    if num_chunks < 1:
        raise ValueError(f"num_chunks must be at least 1, not {num_chunks}")
    if num_nodes == 1:
        return 0.0
    return (num_chunks + num_nodes - 2) * (message_s + weights_bytes * byte_s / num_chunks)


def best_s(num_nodes: int, weights_bytes: int, byte_s: float, message_s: float) -> float:
    """T*(p) = W T_b + (p - 2) T_s + 2 sqrt((p - 2) W T_b T_s): the lower bound of `pipeline_s` over all k."""
    _check(num_nodes, weights_bytes, byte_s, message_s)
    if num_nodes == 1:
        return 0.0
    hops = num_nodes - 2
    return weights_bytes * byte_s + hops * message_s + 2 * math.sqrt(hops * weights_bytes * byte_s * message_s)


class LinkMeter:
    """T_b and T_s of the slowest link from here on down the chain, as seen while versions are forwarded.

    Of the own link, a message costs what the quickest exchange of two small ones took of late, and a byte what is left
    of the time of the quickest version, from its first byte until the other side said that it has them all: a send
    alone would only tell how fast a buffer fills. A link that waits for its own upstream looks as slow as that one,
    which then is what counts.
    """

    def __init__(self) -> None:
        self._messages_s: deque[float] = deque(maxlen=RECENT)
        self._bytes_s: deque[float] = deque(maxlen=RECENT)
        self._told = (0.0, 0.0)

    def message(self, exchange_s: float) -> None:
        """A small message went there and its answer came back."""
        self._messages_s.append(exchange_s)

    def version(self, num_bytes: int, num_chunks: int, took_s: float) -> None:
        """So much was sent and stored. Something has been told to `message` before."""
        if num_bytes > 0:
            moving_s = took_s - num_chunks * min(self._messages_s)
            self._bytes_s.append(max(moving_s / num_bytes, FASTEST_BYTE_S))

    def told(self, byte_s: float, message_s: float) -> None:
        """What the neighbour knows of the links behind it; 0: nothing."""
        self._told = (byte_s, message_s)

    @property
    def message_s(self) -> float:
        """0: not measured yet."""
        return max(min(list(self._messages_s), default=0.0), self._told[1])

    @property
    def byte_s(self) -> float:
        """0: not measured yet."""
        return max(min(list(self._bytes_s), default=0.0), self._told[0])

    def chunk_bytes(self, num_nodes: int, weights_bytes: int) -> int:
        """What `chunk_bytes` says for these links; 0: not measured yet."""
        byte_s, message_s = self.byte_s, self.message_s
        if byte_s == 0 or message_s == 0:
            return 0
        return chunk_bytes(num_nodes, weights_bytes, byte_s, message_s)


def _check(num_nodes: int, weights_bytes: int, byte_s: float, message_s: float) -> None:
    if num_nodes < 1 or weights_bytes < 1 or byte_s < 0 or message_s < 0:
        raise ValueError(
            f"a chain needs nodes, bytes and times: num_nodes={num_nodes} weights_bytes={weights_bytes} "
            f"byte_s={byte_s} message_s={message_s}"
        )
