"""The pool's HTTP routes: they parse, ask the pool, wait until it is durable, and answer. Nothing is decided here."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from fastapi.responses import HTMLResponse, Response

from laminar.pool.page import status_page
from laminar.pool.pool import Pool
from laminar.pool.signals import Signal, until
from laminar.pool.status import job_status
from laminar.shell.answers import MsgpackResponse, Refusal, msgpack_body
from laminar.shell.service import Service
from laminar.wire.dataplane import LeaseCall, LeaseKind, LeaseReply, ProgressCall
from laminar.wire.headers import MSGPACK
from laminar.wire.messages import (
    Ack,
    BeginAttempt,
    BeginAttemptReply,
    ChainEpoch,
    CheckpointDurable,
    CheckpointDurableReply,
    CheckpointFailed,
    CommitStep,
    Event,
    Fence,
    Heartbeat,
    HeartbeatReply,
    JobStatus,
    PublicationView,
    Register,
    Registered,
    ReservedVersion,
    ReserveVersion,
    ResumePoint,
    StepRow,
    StopRequest,
    Take,
    TakeReply,
    TakeStatus,
    VersionComplete,
)

T = TypeVar("T")

MAX_WAIT_S = 60.0
"""A long poll is never longer, whatever the caller asks."""
MAX_LEASE_BYTES = 2**20
MAX_PROGRESS_BYTES = 256 * 2**20
"""A replica that was cut off for minutes sends all that it buffered in one call."""
MAX_EVENTS, MAX_STEPS = 1000, 10_000


def add_routes(service: Service, pool: Pool) -> None:
    """All routes of the contract."""
    _member_routes(service, pool)
    _rollout_routes(service, pool)
    _version_routes(service, pool)
    _trainer_routes(service, pool)
    _checkpoint_routes(service, pool)
    _people_routes(service, pool)


async def _poll(
    service: Service, decide: Callable[[], T | None], news: Signal, wait_s: float, request: Request
) -> T | None:
    """Asks once at least; then again after each news until `wait_s` has passed, the caller is gone or we stop."""
    answer = decide()
    if answer is not None or wait_s <= 0:
        return answer
    return await service.wait(until(decide, news), min(wait_s, MAX_WAIT_S), request)


def _member_routes(service: Service, pool: Pool) -> None:
    router = service.router

    @router.post("/register")
    async def register(body: Register) -> Registered:
        pool.books.journal.admit()
        return await pool.join(body)

    @router.post("/heartbeat")
    async def heartbeat(body: Heartbeat) -> HeartbeatReply:
        return await pool.heartbeat(body)

    @router.get("/members/stream")
    async def members_stream() -> Response:
        return service.push(pool.views(), "application/x-ndjson")

    @router.post("/fence")
    async def fence(body: Fence) -> Ack:
        pool.books.journal.admit()
        await pool.fence(body)
        return Ack()

    @router.post("/epoch")
    async def epoch(body: ChainEpoch) -> Ack:
        pool.books.journal.admit()
        pool.training.new_chain(body)
        await pool.books.journal.commit()
        return Ack()

    _ = register, heartbeat, members_stream, fence, epoch


def _rollout_routes(service: Service, pool: Pool) -> None:
    router, books = service.router, pool.books

    @router.get("/commands/{slot}")
    async def commands(slot: str, incarnation: int) -> Response:
        stream, member = pool.open_commands(slot, incarnation)
        return service.push(pool.commands(stream, member), MSGPACK)

    @router.post("/lease")
    async def lease(request: Request) -> Response:
        call = await msgpack_body(request, LeaseCall, MAX_LEASE_BYTES)
        pool.member(call.slot, call.incarnation)

        def decide() -> LeaseReply | None:
            if books.journal.store.condition is not None:
                return None
            return pool.rollouts.lease(call, pool.member(call.slot, call.incarnation))

        reply = await _poll(service, decide, books.news.leases, call.wait_s, request)
        await books.journal.commit()
        return MsgpackResponse(reply or LeaseReply(kind=LeaseKind.WAIT))

    @router.post("/progress")
    async def progress(request: Request) -> Response:
        call = await msgpack_body(request, ProgressCall, MAX_PROGRESS_BYTES)
        member = pool.member(call.slot, call.incarnation)
        books.journal.admit()
        reply = pool.rollouts.progress(call, member)
        await books.journal.commit()
        return MsgpackResponse(reply)

    @router.post("/relay/complete")
    async def relay_complete(body: VersionComplete) -> Ack:
        pool.member(body.slot, body.incarnation)
        books.journal.admit()
        pool.training.complete(body)
        await books.journal.commit()
        return Ack()

    _ = commands, lease, progress, relay_complete


def _version_routes(service: Service, pool: Pool) -> None:
    router, books, training = service.router, pool.books, pool.training

    @router.post("/trainer/reserve")
    async def reserve(body: ReserveVersion) -> ReservedVersion:
        books.journal.admit()
        reply = training.reserve(body)
        await books.journal.commit()
        return reply

    @router.get("/trainer/publication/{version}")
    async def publication(
        request: Request, version: int, attempt: int, wait_s: float = 0.0, epoch: int | None = None
    ) -> PublicationView:
        view = training.publication(version, attempt)
        if wait_s > 0:
            known = view.epoch if epoch is None else epoch
            await service.wait(pool.visible(version, attempt, known), min(wait_s, MAX_WAIT_S), request)
        await books.journal.commit()
        return training.publication(version, attempt)

    _ = reserve, publication


def _trainer_routes(service: Service, pool: Pool) -> None:
    router, books, training = service.router, pool.books, pool.training

    @router.get("/trainer/resume")
    async def resume(at_most: int | None = None) -> ResumePoint:
        return training.resume_point(at_most)

    @router.post("/trainer/begin")
    async def begin(body: BeginAttempt) -> BeginAttemptReply:
        books.journal.admit()
        return await training.begin(body)

    @router.post("/trainer/take")
    async def take(request: Request, body: Take) -> TakeReply:
        training.fence(body.attempt)

        def decide() -> TakeReply | None:
            return None if books.journal.store.condition is not None else training.take(body)

        reply = await _poll(service, decide, books.news.batches, body.wait_s, request)
        await books.journal.commit()
        return reply or TakeReply(status=TakeStatus.WAIT)

    @router.get("/trainer/slice")
    async def slice_(attempt: int, step: int, rank: int, world: int) -> Response:
        await books.journal.commit()
        return MsgpackResponse(training.slice(attempt, step, rank, world))

    @router.post("/trainer/commit")
    async def commit(body: CommitStep) -> Ack:
        books.journal.admit()
        await training.commit_step(body)
        return Ack()

    _ = resume, begin, take, slice_, commit


def _checkpoint_routes(service: Service, pool: Pool) -> None:
    router, books, training = service.router, pool.books, pool.training

    @router.get("/trainer/ledger")
    async def ledger(attempt: int, step: int) -> Response:
        return Response(await training.ledger_snapshot(attempt, step), media_type="application/octet-stream")

    @router.post("/trainer/checkpoint")
    async def checkpoint(body: CheckpointDurable) -> CheckpointDurableReply:
        books.journal.admit()
        return await training.checkpoint_durable(body)

    @router.post("/trainer/checkpoint_failed")
    async def checkpoint_failed(body: CheckpointFailed) -> Ack:
        training.checkpoint_failed(body)
        await books.journal.commit()
        return Ack()

    _ = ledger, checkpoint, checkpoint_failed


def _people_routes(service: Service, pool: Pool) -> None:
    router, books = service.router, pool.books

    @router.get("/status")
    async def status() -> JobStatus:
        return job_status(books)

    @router.get("/events")
    async def events(after: int = 0, limit: int = 100) -> list[Event]:
        return [event for event in books.journal.events if event.seq > after][: min(max(0, limit), MAX_EVENTS)]

    @router.get("/steps")
    async def steps(after: int = 0) -> list[StepRow]:
        return [row for step, row in books.trained.steps.items() if step > after][:MAX_STEPS]

    @router.post("/stop")
    async def stop(body: StopRequest) -> Ack:
        await pool.stop(body)
        return Ack()

    @service.app.get("/", include_in_schema=False)
    async def page(token: str = "") -> HTMLResponse:
        if not hmac.compare_digest(token.encode(), service.common.token.encode()):
            raise Refusal(401, "unauthorized", "this page needs the job's token: /?token=TOKEN")
        return HTMLResponse(status_page(service.common.job_uid), headers={"cache-control": "no-store"})

    _ = status, events, steps, stop, page
