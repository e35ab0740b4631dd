"""Calls to a service from asyncio: typed answers, typed refusals, bounded retries.

Every call may be repeated by its contract (laminar.wire.messages), so a lost answer is asked for again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Self, TypeVar

import aiohttp
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
    "Conflict", "Malformed", "PoolClient", "Refused", "Superseded", "Unauthorized", "Unknown", "Unreachable",
]  # fmt: skip

M = TypeVar("M", bound=BaseModel)
S = TypeVar("S", bound=msgspec.Struct)
Params = Mapping[str, str | int | float]

KEEP_ALIVE_S = 15.0
"""Shorter than the services' own, so that the client is the one who closes an idle connection."""
MAX_FRAME_BYTES = 256 * 2**20
MAX_LINE_BYTES = 16 * 2**20


class PoolClient:
    """One caller's connections to one service. Use on one event loop; `close` at the end (or `async with`).

    `get_json`, `post_json` and `post_msgpack` try again on lost connections, time-outs, 429 and 5xx until
    `deadline_s` has passed (None: for ever), then raise Unreachable; each attempt is bounded by `timeout_s`.
    A refusal (4xx) raises the subclass of Refused. Control and data calls have sessions of their own, so that a
    large batch never stands in front of a heartbeat.
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
        self.url = url.rstrip("/")
        self.generation = generation
        """Sent with each call; `Member.join` sets it to what the pool answered."""
        self._token = token
        self._job_uid = job_uid
        self._name = name
        self._rng = rng or random.Random(f"{name}/{job_uid}")
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes all connections; calls in flight raise."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()

    async def get_json(
        self, path: str, model: type[M], timeout_s: float = 10.0, *, deadline_s: float | None = None,
        params: Params | None = None,
    ) -> M:  # fmt: skip
        """GET; the answer as `model`."""
        return model.model_validate_json(
            await self._call("control", "GET", path, None, "", timeout_s, deadline_s, params)
        )

    async def post_json(
        self, path: str, body: BaseModel, model: type[M], timeout_s: float = 10.0, *, deadline_s: float | None = None
    ) -> M:
        """POST of a JSON message; the answer as `model`."""
        data = body.model_dump_json().encode()
        answer = await self._call("control", "POST", path, data, "application/json", timeout_s, deadline_s)
        return model.model_validate_json(answer)

    async def get_msgpack(
        self, path: str, type_: type[S], timeout_s: float = 30.0, *, deadline_s: float | None = None,
        params: Params | None = None,
    ) -> S:  # fmt: skip
        """GET; the MessagePack answer as `type_`."""
        return codec.decode(await self._call("data", "GET", path, None, "", timeout_s, deadline_s, params), type_)

    async def post_msgpack(
        self, path: str, struct: msgspec.Struct, type_: type[S], timeout_s: float = 30.0, *,
        deadline_s: float | None = None,
    ) -> S:  # fmt: skip
        """POST of a MessagePack message; the answer as `type_`. For a long poll, `timeout_s` is above the wait."""
        answer = await self._call("data", "POST", path, codec.encode(struct), MSGPACK, timeout_s, deadline_s)
        return codec.decode(answer, type_)

    async def get_bytes(
        self, path: str, timeout_s: float = 30.0, *, deadline_s: float | None = None, params: Params | None = None
    ) -> bytes:
        """GET; the answer as it is."""
        return await self._call("data", "GET", path, None, "", timeout_s, deadline_s, params)

    async def stream_frames(
        self, path: str, type_: type[S], *, params: Params | None = None, idle_s: float = 5.0,
        deadline_s: float | None = None,
    ) -> AsyncIterator[S]:  # fmt: skip
        """The frames of one connection. Ends when the service ends the stream (it is stopping).

        Connecting is retried until `deadline_s`; a stream that breaks off, or is silent for `idle_s`, raises
        Unreachable; the caller decides whether to open another. Closing the iterator closes the connection.
        """
        async with self._stream(path, params, idle_s, deadline_s) as content:
            while True:
                prefix = await _exactly(content, 4)
                if prefix is None:
                    return
                size = int.from_bytes(prefix, "little")
                if size > MAX_FRAME_BYTES:
                    raise Unreachable(f"{path}: a frame of {size} bytes; the limit is {MAX_FRAME_BYTES}")
                body = await _exactly(content, size)
                if body is None:
                    raise Unreachable(f"{path}: the stream broke off inside a frame")
                yield codec.decode(body, type_)

    async def stream_json_lines(
        self, path: str, model: type[M], *, params: Params | None = None, idle_s: float = 5.0,
        deadline_s: float | None = None,
    ) -> AsyncIterator[M]:  # fmt: skip
        """As `stream_frames`, for newline-delimited JSON."""
        async with self._stream(path, params, idle_s, deadline_s) as content:
            while line := await content.readline():
                if not line.endswith(b"\n"):
                    raise Unreachable(f"{path}: the stream broke off inside a line")
                if line.strip():
                    yield model.model_validate_json(line)

    def _session(self, purpose: str) -> aiohttp.ClientSession:
        session = self._sessions.get(purpose)
        if session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            session = aiohttp.ClientSession(
                connector=connector, read_bufsize=2**18, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            )
            self._sessions[purpose] = session
        return session

    def _headers(self) -> dict[str, str]:
        return Identity(self._token, self._job_uid, self.generation, self._name).headers()

    async def _call(
        self, purpose: str, method: str, path: str, body: bytes | None, content_type: str, timeout_s: float,
        deadline_s: float | None, params: Params | None = None,
    ) -> bytes:  # fmt: skip
        retry = Retry(self._rng, deadline_s)
        kind = {"content-type": content_type} if content_type else {}
        while True:
            timeout = aiohttp.ClientTimeout(total=retry.attempt_timeout_s(timeout_s))
            try:
                async with self._session(purpose).request(
                    method, self.url + path, data=body, params=params, headers=self._headers() | kind,
                    timeout=timeout, allow_redirects=False,
                ) as response:  # fmt: skip
                    answer = await response.read()
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                reason = f"{method} {self.url}{path}: {type(error).__name__} {error}"
            else:
                if response.status < 300:
                    return answer
                refused = refusal_of(response.status, answer)
                if not is_retried(refused, self.generation):
                    raise refused
                reason = f"{method} {self.url}{path}: {refused}"
            await asyncio.sleep(retry.pause_s(reason))

    @asynccontextmanager
    async def _stream(
        self, path: str, params: Params | None, idle_s: float, deadline_s: float | None
    ) -> AsyncGenerator[aiohttp.StreamReader]:
        response = await self._open_stream(path, params, idle_s, deadline_s)
        try:
            yield response.content
        except (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError) as error:
            if isinstance(error, (Unreachable, msgspec.ValidationError)):
                raise
            raise Unreachable(f"{self.url}{path}: {type(error).__name__} {error}") from error
        finally:
            response.close()

    async def _open_stream(
        self, path: str, params: Params | None, idle_s: float, deadline_s: float | None
    ) -> aiohttp.ClientResponse:
        retry = Retry(self._rng, deadline_s)
        while True:
            connect_s = retry.attempt_timeout_s(idle_s)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=idle_s)
            try:
                response = await self._session("streams").get(
                    self.url + path, params=params, headers=self._headers(), timeout=timeout, allow_redirects=False,
                    read_bufsize=MAX_LINE_BYTES,
                )  # fmt: skip
                if response.status < 300:
                    return response
                async with response:
                    answer = await response.read()
                refused = refusal_of(response.status, answer)
                if not is_retried(refused, self.generation):
                    raise refused
                reason = f"GET {self.url}{path}: {refused}"
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                reason = f"GET {self.url}{path}: {type(error).__name__} {error}"
            await asyncio.sleep(retry.pause_s(reason))


async def _exactly(content: aiohttp.StreamReader, size: int) -> bytes | None:
    """`size` bytes; None at a clean end; raises Unreachable when the stream ends in between."""
    try:
        return await content.readexactly(size)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise Unreachable("the stream broke off inside a frame") from error
