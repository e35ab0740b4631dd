"""Answers of a service: MessagePack bodies, pushed streams, and errors as `Problem`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from laminar.wire import codec
from laminar.wire.headers import MSGPACK
from laminar.wire.messages import Problem

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")

_WORDS = {400: "malformed", 401: "unauthorized", 404: "unknown", 405: "unknown", 413: "too_large", 422: "malformed"}


class Refusal(Exception):
    """Raised in a handler: the answer is `status` with this `Problem`."""

    def __init__(self, status: int, error: str, detail: str, current: int | None = None) -> None:
        super().__init__(f"{status} {error}: {detail}")
        self.status = status
        self.problem = Problem(error=error, detail=detail, current=current)


class MsgpackResponse(Response):
    """A data-plane message as the answer."""

    media_type = MSGPACK

    def __init__(self, struct: msgspec.Struct, status_code: int = 200) -> None:
        super().__init__(codec.encode(struct), status_code)


async def msgpack_body(request: Request, type_: type[S], limit_bytes: int) -> S:
    """The request's MessagePack body. Raises Refusal: 413 above `limit_bytes`, 422 for what does not fit."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise Refusal(413, "too_large", f"the body is longer than {limit_bytes} bytes")
    try:
        return codec.decode(bytes(body), type_)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise Refusal(422, "malformed", str(error)) from error


class PushResponse(Response):
    """A chunked stream. Ends when the generator does, when the caller goes away, or when `stopping` is set.

    The generator is closed in each case. A slow caller holds the generator up; nothing is buffered beyond the socket.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], stopping: asyncio.Event, media_type: str) -> None:
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers()
        self._chunks = chunks
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._chunks):
            await first_of(self._pump(send), until_gone(receive), self._stopping.wait())
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send) -> None:
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def until_gone(receive: Receive) -> None:
    """Returns when the caller has closed its connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def first_of(wanted: Coroutine[Any, Any, T], *ends: Coroutine[Any, Any, Any]) -> T | None:
    """The result of `wanted` if it comes first, else None; all others are cancelled and have ended on return.

    Raises what any of them raised, also on its way out.
    """
    main = asyncio.create_task(wanted)
    tasks: list[asyncio.Task[Any]] = [main, *(asyncio.create_task(end) for end in ends)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return main.result() if main in done else None


def problem_response(status: int, problem: Problem) -> Response:
    """`Problem` as JSON."""
    return Response(problem.model_dump_json(), status, media_type="application/json")


def install_answers(app: FastAPI) -> None:
    """Makes every error answer of `app` a `Problem`."""

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return problem_response(error.status, error.problem)

    async def malformed(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        details = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]
        return problem_response(422, Problem(error="malformed", detail="; ".join(details)))

    async def http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        word = _WORDS.get(error.status_code, "refused")
        return problem_response(error.status_code, Problem(error=word, detail=str(error.detail)))

    async def gone(_: Request, error: Exception) -> Response:
        del error
        return Response(status_code=400)  # nobody reads it

    async def unexpected(_: Request, error: Exception) -> Response:
        return problem_response(500, Problem(error="internal", detail=f"{type(error).__name__}: {error}"))

    app.add_exception_handler(Refusal, refused)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, unexpected)
