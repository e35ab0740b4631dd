"""A stand-in for every service, for tests of the driver: it registers, beats, obeys, and trains nothing.

The pool counts steps that the trainer reports and keeps its books in one file, so that it survives its own death.
"""

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from laminar.shell.process import die_with_parent
from laminar.shell.settings import Common
from laminar.wire import messages as m

SUSPECT_AFTER_S = 1.0
STEP_S = 0.1


class StandinPool:
    def __init__(self, common: Common) -> None:
        self.common = common
        self.steps = common.load_job().spec.steps
        self.file = Path(os.environ["LAMINAR_STORE"]) / "books.json"
        self.books: dict[str, Any] = {
            "incarnation": 0,
            "attempt": 0,
            "step": 0,
            "stop": False,
            "ended": False,
            "epoch": 0,
        }
        if self.file.exists():
            self.books = json.loads(self.file.read_text()) | {"stop": False}
        known = self.books.setdefault("members", {})
        self.members = {slot: m.MemberView.model_validate(view) for slot, view in known.items()}
        self.heard_s = {slot: time.monotonic() for slot in known}
        self.fences: list[str] = []

    def save(self) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.books))
        new.rename(self.file)

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/healthz", self.healthz), web.post("/v1/register", self.register),
                web.post("/v1/heartbeat", self.heartbeat), web.get("/v1/members/stream", self.stream),
                web.post("/v1/fence", self.fence), web.post("/v1/epoch", self.epoch), web.post("/v1/stop", self.stop),
                web.post("/v1/standin/step", self.step), web.get("/v1/status", self.status),
                web.get("/v1/steps", self.rows), web.get("/v1/events", self.events),
            ]
        )  # fmt: skip
        return app

    async def healthz(self, _: web.Request) -> web.Response:
        return web.Response()

    async def register(self, request: web.Request) -> web.Response:
        body = m.Register.model_validate_json(await request.read())
        self.books["incarnation"] += 1
        if body.role is m.Role.TRAINER:
            self.books["attempt"] = max(self.books["attempt"], body.attempt)
        self.heard_s[body.slot] = time.monotonic()
        self.members[body.slot] = m.MemberView(
            slot=body.slot, role=body.role, index=body.index, life=body.life, incarnation=self.books["incarnation"],
            machine=body.machine, pid=body.pid, http_address="", data_address="", state=m.MemberState.RUNNING,
            connected=True, silent_s=0, suspect=False,
        )  # fmt: skip
        self.books["members"][body.slot] = self.members[body.slot].model_dump(mode="json")
        self.save()
        return reply(m.Registered(incarnation=self.books["incarnation"], generation=1))

    async def heartbeat(self, request: web.Request) -> web.Response:
        body = m.Heartbeat.model_validate_json(await request.read())
        known = self.members.get(body.slot)
        if known is None or known.incarnation != body.incarnation:
            return web.Response(status=410)
        self.heard_s[body.slot] = time.monotonic()
        return reply(m.HeartbeatReply())

    def phase(self) -> m.PoolPhase:
        if self.books["step"] >= self.steps:
            return m.PoolPhase.COMPLETE
        return m.PoolPhase.STOPPED if self.books["ended"] else m.PoolPhase.TRAINING

    def view(self) -> m.PoolView:
        now_s = time.monotonic()
        silent_s = {slot: now_s - heard_s for slot, heard_s in self.heard_s.items()}
        members = [
            view.model_copy(update={"silent_s": silent_s[slot], "suspect": silent_s[slot] > SUSPECT_AFTER_S})
            for slot, view in self.members.items()
        ]
        return m.PoolView(
            generation=1, phase=self.phase(), members=members, highest_epoch=self.books["epoch"],
            attempt=self.books["attempt"], durable_step=self.books["step"],
        )  # fmt: skip

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for line in self.lines():
            await response.write(line)
        return response

    async def lines(self) -> AsyncIterator[bytes]:
        while True:
            yield self.view().model_dump_json().encode() + b"\n"
            await asyncio.sleep(0.1)

    async def fence(self, request: web.Request) -> web.Response:
        body = m.Fence.model_validate_json(await request.read())
        self.fences.append(f"{body.slot} fenced at incarnation {body.incarnation}")
        return reply(m.Ack())

    async def epoch(self, request: web.Request) -> web.Response:
        self.books["epoch"] = m.ChainEpoch.model_validate_json(await request.read()).epoch
        self.save()
        return reply(m.Ack())

    async def stop(self, _: web.Request) -> web.Response:
        self.books["stop"] = True
        return reply(m.Ack())

    async def step(self, _: web.Request) -> web.Response:
        if self.books["stop"]:
            self.books["ended"] = True
        else:
            self.books["step"] += 1
            self.books["ended"] = False
        self.save()
        return web.json_response({"go_on": not self.books["ended"] and self.books["step"] < self.steps})

    async def status(self, _: web.Request) -> web.Response:
        view = self.view()
        return reply(
            m.JobStatus(
                job=self.common.job, uid=self.common.job_uid, generation=1, phase=view.phase, steps=self.steps,
                committed_step=self.books["step"], attempt=self.books["attempt"], newest=None,
                epoch=self.books["epoch"], chain=[], members=view.members, loads={}, counts=m.LedgerCounts(),
                inherent=m.Histogram(), consumed=m.Histogram(), last_step=None, evaluations=[], checkpoints=[],
                wall_s=0,
            )
        )  # fmt: skip

    async def rows(self, request: web.Request) -> web.Response:
        after = int(request.query["after"])
        rows = [
            m.StepRow(step=k, attempt=1, version=k, wall_s=k, reward_mean=k / self.steps, num_samples=8,
                      response_tokens=80).model_dump(mode="json")
            for k in range(1, self.books["step"] + 1) if k > after
        ]  # fmt: skip
        return web.json_response(rows)

    async def events(self, request: web.Request) -> web.Response:
        after = int(request.query["after"])
        events = [
            m.Event(seq=seq, wall_s=time.time(), kind="fence", text=text).model_dump(mode="json")
            for seq, text in enumerate(self.fences, start=1) if seq > after
        ]  # fmt: skip
        return web.json_response(events)


class StandinMember:
    """Relay, rollout or trainer."""

    def __init__(self, common: Common, session: aiohttp.ClientSession) -> None:
        self.common = common
        self.session = session
        self.role, _, self.index = common.slot.rpartition("-")

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/healthz", self.ok), web.post("/v1/epoch", self.ok)])
        return app

    async def ok(self, _: web.Request) -> web.Response:
        return reply(m.Ack())

    async def post(self, path: str, body: m.Message | None) -> bytes | None:
        """None: refused. Tries again while the pool is away."""
        while True:
            try:
                data = b"" if body is None else body.model_dump_json().encode()
                async with self.session.post(self.common.pool_url + path, data=data) as response:
                    return await response.read() if response.status == 200 else None
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.05)

    async def live(self) -> int:
        while True:
            register = m.Register(
                slot=self.common.slot, role=m.Role(self.role), index=int(self.index), life=self.common.life,
                nonce=f"{os.getpid()}", pid=os.getpid(), machine=self.common.machine,
                attempt=int(os.environ.get("LAMINAR_ATTEMPT", "0")),
            )  # fmt: skip
            answer = await self.post("/v1/register", register)
            assert answer is not None
            incarnation = m.Registered.model_validate_json(answer).incarnation
            beat = m.Heartbeat(slot=self.common.slot, incarnation=incarnation, state=m.MemberState.RUNNING)
            while await self.post("/v1/heartbeat", beat) is not None:
                if self.role == "trainer":
                    answer = await self.post("/v1/standin/step", None)
                    if answer is not None and not json.loads(answer)["go_on"]:
                        return 0
                await asyncio.sleep(STEP_S)


def reply(message: m.Message) -> web.Response:
    return web.Response(body=message.model_dump_json().encode(), content_type="application/json")


async def main(common: Common) -> int:
    timeout = aiohttp.ClientTimeout(total=2)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        service = StandinPool(common) if common.slot == "pool-0" else StandinMember(common, session)
        runner = web.AppRunner(service.app(), handle_signals=True, shutdown_timeout=0.1)
        await runner.setup()
        listener = socket.socket(fileno=int(common.listen.removeprefix("fd:")))
        await web.SockSite(runner, listener).start()
        if isinstance(service, StandinMember):
            return await service.live()
        await asyncio.Event().wait()
        return 0


if __name__ == "__main__":
    die_with_parent()
    mistake = Path(os.environ["LAMINAR_DIR"]) / "mistake"
    if mistake.exists():
        print("\nerror: " + mistake.read_text())
        sys.exit(2)
    sys.exit(asyncio.run(main(Common.from_env())))
