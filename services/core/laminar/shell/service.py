"""The shell of every service: one event loop with an HTTP server, health, metrics, and an orderly end.

    service = Service(Common.from_env(), title="relay", version="0.1.0")
    @service.router.post("/epoch")
    async def epoch(body: ChainEpoch) -> Ack: ...
    await service.run(loop_a(service), loop_b(service))

Life: starting -> (set_ready) ready -> SIGTERM or `stop` -> `stopping` set -> server drained -> `drained` set ->
loops returned -> `run` returns the exit code. Any exception of a loop, or of a handler, ends the process.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, TypeVar

import uvicorn
import uvloop
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from laminar.core.reconcile import EXIT_BAD_INPUT
from laminar.shell.answers import (
    MsgpackResponse,
    PushResponse,
    Refusal,
    first_of,
    install_answers,
    msgpack_body,
    until_gone,
)
from laminar.shell.logs import configure_logging, fields
from laminar.shell.process import die_with_parent
from laminar.shell.settings import Common, SettingsError
from laminar.shell.sockets import BACKLOG, bound_address, listening_socket
from laminar.wire import headers

__all__ = ["MsgpackResponse", "PushResponse", "Refusal", "Service", "msgpack_body", "start"]

T = TypeVar("T")
log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
"""What loops get to return after `drained`, before they are cancelled."""
DRAIN_S = 2
"""What handlers in flight get to answer once the service is stopping."""
KEEP_ALIVE_S = 60
"""Above the clients' 15 s, so that a service never closes a connection that a client is about to use."""
LAG_PERIOD_S = 0.25
LAG_WINDOW = 16
"""The gauge is the worst of the last 4 s; four wake-ups a second cost nothing that can be measured."""
LAG_WARNING_S = 1.0


class Service:
    """One service process: `app`, `router` (prefix /v1, authenticated), `registry`, health, and its end.

    /healthz is 503 while a loop of `watch` has not called `progress` within its limit; /readyz is 503 until
    `set_ready(True)` and once stopping; /metrics serves `registry`. Errors are `Problem` JSON. /v1 needs the job's
    token (401) and uid (409 "job"); a generation header other than `generation` gets 409 "generation".
    An unexpected exception in a handler answers 500 and ends the process: what it held in memory may be wrong, and
    callers try again.
    """

    def __init__(self, common: Common, title: str, version: str, *, body_limit_bytes: int = 64 * 2**20) -> None:
        self.common = common
        self.generation = common.generation
        self.stopping = asyncio.Event()
        """Set by SIGTERM, SIGINT or `stop`: admit nothing more; handlers and streams end."""
        self.drained = asyncio.Event()
        """Set when no handler runs any more: what they left can be flushed for good."""
        self.address = ""
        """host:port, once `run` has bound it."""
        self.registry = CollectorRegistry()
        self.app = FastAPI(
            title=f"laminar {title}",
            version=version,
            docs_url=None,
            redoc_url=None,
            max_body_size=body_limit_bytes,
        )
        self.router = APIRouter(prefix="/v1", dependencies=[Depends(self._authenticate)])
        self._limits_s: dict[str, float] = {}
        self._progress_s: dict[str, float] = {}
        self._ready, self._ready_reason = False, "starting"
        self._exit_code = 0
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        ProcessCollector(registry=self.registry)
        self._lag = Gauge("laminar_loop_lag_seconds", "Worst event loop lag of the last 4 s", registry=self.registry)
        self._requests = Counter(
            "laminar_http_requests", "Answered requests", ["route", "status"], registry=self.registry
        )
        install_answers(self.app)
        self._add_probes()

    def watch(self, name: str, limit_s: float) -> None:
        """From now on /healthz wants `progress(name)` at least every `limit_s`."""
        self._limits_s[name] = limit_s
        self._progress_s[name] = time.monotonic()

    def unwatch(self, name: str) -> None:
        """The loop has ended as it should."""
        del self._limits_s[name]

    def progress(self, name: str) -> None:
        """The loop `name` (of `watch`) has gone round once more."""
        assert name in self._limits_s, f"watch({name!r}, limit_s) first"
        self._progress_s[name] = time.monotonic()

    def set_ready(self, ready: bool, reason: str = "") -> None:  # noqa: FBT001 - the answer of /readyz, not a mode
        """Whether /readyz answers 200; `reason` says what is missing."""
        self._ready, self._ready_reason = ready, reason

    def stop(self, exit_code: int = 0) -> None:
        """Begins the orderly end; `run` will return `exit_code`. The first call counts."""
        if not self.stopping.is_set():
            self._exit_code = exit_code
            self.stopping.set()

    def fail(self, error: BaseException) -> None:
        """`run` raises `error` now. For errors outside the loops of `run`."""
        if self._failure is None:
            self._failure = error
            self._failed.set()

    async def wait(self, awaitable: Coroutine[Any, Any, T], wait_s: float, request: Request | None = None) -> T | None:
        """The result, or None once `wait_s` has passed or the service is stopping: the body of a long poll.

        With `request`, also None when its caller has gone away. The awaitable is cancelled then.
        """
        ends: list[Coroutine[Any, Any, Any]] = [self.stopping.wait()]
        if request is not None:
            ends.append(until_gone(request.receive))
        limit = asyncio.timeout(wait_s)
        try:
            async with limit:
                return await first_of(awaitable, *ends)
        except TimeoutError:
            if not limit.expired():
                raise
            return None

    def push(self, chunks: AsyncGenerator[bytes, None], media_type: str) -> PushResponse:
        """A chunked stream that ends at once when the caller goes away or the service stops.

        The generator is closed then: what stands in its `finally` runs within the same turn of the loop.
        """
        return PushResponse(chunks, self.stopping, media_type)

    def asgi(self) -> ASGIApp:
        """The whole application, router included; call once, after all routes are there."""
        self.app.include_router(self.router)
        return self._guarded

    async def run(self, *loops: Coroutine[Any, Any, None], grace_s: float = STOP_GRACE_S) -> int:
        """Serves LAMINAR_LISTEN and runs `loops` until the orderly end; returns the exit code.

        A loop may return early. Once stopping, it should return after its last work (see `stopping`, `drained`);
        it is cancelled `grace_s` after `drained`. An exception of one cancels all and is raised.
        """
        try:
            sock = listening_socket(self.common.listen)
        except SettingsError:
            for loop in loops:
                loop.close()
            raise
        self.address = bound_address(sock)
        server = _Server(_server_config(self.asgi()))
        running = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            running.add_signal_handler(sig, self.stop)
        log.info("serving", extra=fields(address=self.address))
        try:
            async with asyncio.TaskGroup() as tasks:
                own = [tasks.create_task(loop, name=loop.__qualname__) for loop in loops]
                watchers = [tasks.create_task(self._measure_lag()), tasks.create_task(self._raise_failure())]
                serving = tasks.create_task(server.serve(sockets=[sock]))
                await self.stopping.wait()
                server.should_exit = True
                await serving
                self.drained.set()
                await _let_end(own, grace_s)
                for task in watchers:
                    task.cancel()
        finally:
            for sig in (signal.SIGTERM, signal.SIGINT):
                running.remove_signal_handler(sig)
        log.info("stopped", extra=fields(exit_code=self._exit_code))
        return self._exit_code

    async def _raise_failure(self) -> None:
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    async def _measure_lag(self) -> None:
        recent: deque[float] = deque(maxlen=LAG_WINDOW)
        loop = asyncio.get_running_loop()
        while True:
            planned_s = loop.time() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            recent.append(max(0.0, loop.time() - planned_s))
            self._lag.set(max(recent))
            if recent[-1] > LAG_WARNING_S:
                log.warning("the event loop was blocked", extra=fields(lag_s=recent[-1]))

    def _add_probes(self) -> None:
        @self.app.get("/healthz", include_in_schema=False)
        async def healthz() -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
            now_s = time.monotonic()
            silent_s = {name: round(now_s - self._progress_s[name], 3) for name in self._limits_s}
            stuck = sorted(name for name, silence_s in silent_s.items() if silence_s > self._limits_s[name])
            return JSONResponse({"ok": not stuck, "stuck": stuck, "silent_s": silent_s}, 503 if stuck else 200)

        @self.app.get("/readyz", include_in_schema=False)
        async def readyz() -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
            ready = self._ready and not self.stopping.is_set()
            reason = "stopping" if self.stopping.is_set() else self._ready_reason
            return JSONResponse({"ready": ready, "reason": reason}, 200 if ready else 503)

        @self.app.get("/metrics", include_in_schema=False)
        async def metrics() -> Response:  # pyright: ignore[reportUnusedFunction]
            return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def _authenticate(self, request: Request) -> None:
        given = request.headers.get(headers.AUTHORIZATION, "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.common.token}".encode()):
            raise Refusal(401, "unauthorized", "this needs the job's token: Authorization: Bearer TOKEN")
        job = request.headers.get(headers.JOB)
        if job != self.common.job_uid:
            raise Refusal(409, "job", f"this is job {self.common.job_uid}; the call is for {job or 'none'}")
        generation = request.headers.get(headers.GENERATION)
        if generation is not None and generation != str(self.generation):
            detail = f"this is generation {self.generation}; the call says {generation}"
            raise Refusal(409, "generation", detail, current=self.generation)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Around every request: counts its answer; ends the process on an unexpected exception."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 500

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, counting_send)
        except Exception as error:
            self.fail(error)
            raise
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._requests.labels(route, str(status)).inc()


class _Server(uvicorn.Server):
    """Leaves the signals to Service."""

    def capture_signals(self) -> AbstractContextManager[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return nullcontext()


def _server_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app, interface="asgi3", http="httptools", ws="none", lifespan="on", log_config=None, access_log=False,
        proxy_headers=False, server_header=False, date_header=False, timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S, backlog=BACKLOG,
    )  # fmt: skip


async def _let_end(tasks: list[asyncio.Task[None]], grace_s: float) -> None:
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=grace_s)
    for task in late:
        log.warning("cancelled a loop that did not end by itself", extra=fields(loop=task.get_name()))
        task.cancel()


def start(main: Callable[[Common], Awaitable[int]]) -> NoReturn:
    """The whole of a service's `__main__`: settings, logs, event loop; exits with what `main` returns.

    The process dies with its parent. Wrong settings are one line and EXIT_BAD_INPUT; an exception is a traceback and 1.
    """
    die_with_parent()
    try:
        common = Common.from_env()
        configure_logging(common)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(_settled(main, common))
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    sys.exit(code)


async def _settled(main: Callable[[Common], Awaitable[int]], common: Common) -> int:
    return await main(common)
