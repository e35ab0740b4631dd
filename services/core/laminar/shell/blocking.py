"""Calls to a service without asyncio, for trainer ranks and the publisher's thread.

Same calls, retries and errors as `laminar.shell.client`, without aiohttp.
"""

from __future__ import annotations

import http.client
import random
import socket
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec
from pydantic import BaseModel

from laminar.shell.calls import (
    Conflict,
    Identity,
    Malformed,
    Refused,
    Retry,
    Superseded,
    Unauthorized,
    Unknown,
    Unreachable,
    is_retried,
    refusal_of,
)
from laminar.wire import codec
from laminar.wire.headers import MSGPACK

__all__ = [
    "BlockingClient", "Conflict", "Malformed", "Refused", "Superseded", "Unauthorized", "Unknown", "Unreachable",
]  # fmt: skip

M = TypeVar("M", bound=BaseModel)
S = TypeVar("S", bound=msgspec.Struct)
Params = Mapping[str, str | int | float]


class BlockingClient:
    """One keep-alive connection to one service. For one thread at a time: each thread makes its own.

    Calls try again on lost connections, time-outs, 429 and 5xx until `deadline_s` has passed (None: for ever), then
    raise Unreachable; each attempt is bounded by `timeout_s`. A refusal (4xx) raises the subclass of Refused.
    """

    def __init__(
        self,
        url: str,
        token: str,
        job_uid: str,
        generation: int | None,
        name: str,
        rng: random.Random | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None or parts.port is None:
            raise ValueError(f"url {url!r} is not http://host:port")
        self.url = url.rstrip("/")
        self._host, self._port = parts.hostname, parts.port
        self._generation = generation
        self._headers = Identity(token, job_uid, generation, name).headers()
        self._rng = rng or random.Random(f"{name}/{job_uid}")
        self._connection: http.client.HTTPConnection | None = None
        self._in_use = threading.Lock()
        self._aborted = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; the next call would open another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def abort(self) -> None:
        """From any thread, for good: a call that waits to try again raises Unreachable now, later ones at once."""
        self._aborted.set()

    def get_json(
        self, path: str, model: type[M], timeout_s: float = 10.0, *, deadline_s: float | None = None,
        params: Params | None = None,
    ) -> M:  # fmt: skip
        """GET; the answer as `model`."""
        return model.model_validate_json(self.get_bytes(path, timeout_s, deadline_s=deadline_s, params=params))

    def post_json(
        self, path: str, body: BaseModel, model: type[M], timeout_s: float = 10.0, *, deadline_s: float | None = None
    ) -> M:
        """POST of a JSON message; the answer as `model`."""
        data = body.model_dump_json().encode()
        return model.model_validate_json(self._call("POST", path, data, "application/json", timeout_s, deadline_s))

    def get_msgpack(
        self, path: str, type_: type[S], timeout_s: float = 30.0, *, deadline_s: float | None = None,
        params: Params | None = None,
    ) -> S:  # fmt: skip
        """GET; the MessagePack answer as `type_`."""
        return codec.decode(self.get_bytes(path, timeout_s, deadline_s=deadline_s, params=params), type_)

    def post_msgpack(
        self, path: str, struct: msgspec.Struct, type_: type[S], timeout_s: float = 30.0, *,
        deadline_s: float | None = None,
    ) -> S:  # fmt: skip
        """POST of a MessagePack message; the answer as `type_`."""
        return codec.decode(self._call("POST", path, codec.encode(struct), MSGPACK, timeout_s, deadline_s), type_)

    def get_bytes(
        self, path: str, timeout_s: float = 30.0, *, deadline_s: float | None = None, params: Params | None = None
    ) -> bytes:
        """GET; the answer as it is."""
        query = f"{path}?{urlencode(params)}" if params else path
        return self._call("GET", query, None, "", timeout_s, deadline_s)

    def _call(
        self, method: str, path: str, body: bytes | None, content_type: str, timeout_s: float,
        deadline_s: float | None,
    ) -> bytes:  # fmt: skip
        mine = self._in_use.acquire(blocking=False)
        assert mine, "a BlockingClient serves one thread at a time"
        try:
            retry = Retry(self._rng, deadline_s)
            headers = self._headers | ({"content-type": content_type} if content_type else {})
            while True:
                try:
                    status, answer = self._attempt(method, path, body, headers, retry.attempt_timeout_s(timeout_s))
                except (OSError, http.client.HTTPException) as error:
                    self.close()
                    reason = f"{method} {self.url}{path}: {type(error).__name__} {error}"
                else:
                    if status < 300:
                        return answer
                    refused = refusal_of(status, answer)
                    if not is_retried(refused, self._generation):
                        raise refused
                    reason = f"{method} {self.url}{path}: {refused}"
                if self._aborted.wait(retry.pause_s(reason)):
                    raise Unreachable(f"given up: {reason}")
        finally:
            self._in_use.release()

    def _attempt(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        """One request. `timeout_s` bounds the wait for each piece, and the whole answer twice over."""
        ends_s = time.monotonic() + 2 * timeout_s
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
            self._connection.connect()
            self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        elif self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        self._connection.request(method, path, body=body, headers=headers)
        response = self._connection.getresponse()
        pieces: list[bytes] = []
        while piece := response.read1(2**20):
            pieces.append(piece)
            if time.monotonic() > ends_s:
                raise TimeoutError(f"the answer took more than {2 * timeout_s} s")
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        response.close()  # read1 leaves a whole answer open, and an open one blocks the next request
        if response.will_close:
            self.close()
        return response.status, b"".join(pieces)
