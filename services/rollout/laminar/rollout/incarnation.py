"""One incarnation of a replica: an engine, the samples granted to it, and the loops that tie them to the pool.

    loop          waits for                              changes
    engine        events of the engine                   assignments (tokens, ends), live version
    lease         the last end, told to the pool         assignments (grants), engine (load, add)
    flush         news in the assignments                the pool; assignments (what is durable)
    commands      the pool, on its own connection        assignments (adopt, cancel)
    grades        the graders' results                   assignments
    heartbeat     one second                             nothing

Life: starting -> (loading -> idle -> running)* -> ended, by whatever raises first: EngineExited, Superseded (the pool's
410), Unknown (the pool does not know it), Fenced. Whoever owns it then kills the engine and begins a new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import assert_never

from laminar.rollout.assignments import Assignments, Who
from laminar.rollout.engine import Engine, EngineExited
from laminar.rollout.engine_messages import (
    Begin,
    EngineReady,
    EngineRefused,
    Load,
    LoadResult,
    LoadStatus,
    Progress,
)
from laminar.rollout.grading import GraderPool
from laminar.rollout.metrics import RolloutMetrics
from laminar.rollout.settings import RolloutSettings
from laminar.shell.calls import Refused, Unreachable
from laminar.shell.client import PoolClient
from laminar.shell.logs import fields
from laminar.shell.member import Member
from laminar.wire.dataplane import (
    Command,
    CommandKind,
    GradeItem,
    GroupGrant,
    LeaseCall,
    LeaseKind,
    LeaseReply,
    ProgressReply,
)
from laminar.wire.messages import Heartbeat, HeartbeatReply, MemberState

log = logging.getLogger(__name__)

APPEND_INTERVAL_S = 1.0
"""One call a second carries a replica's new tokens: what its death costs at most."""
COALESCE_S = 0.05
"""An end is told at once, together with those that come just behind it."""
LEASE_WAIT_S = 20.0
LEASE_TIMEOUT_S = 30.0
LOAD_WAIT_S = 5.0
"""How long the relay is asked for a version before the pool is asked what is newest."""
START_LIMIT_S = 600.0
"""Imports and the model's folder from a slow disk; an engine that needs longer hangs, and another is tried."""
LOAD_LIMIT_S = 120.0
"""An engine that has not answered a load by then is given up; its agent cannot see why."""
AFTER_FAILURE_S = 0.5
AFTER_END_S = 2.0
"""The pool needs nothing more; a moved sample or an evaluation may still come."""
GOODBYE_LIMIT_S = 1.0
PAUSE_LIMIT_S = 3.0
FLUSH_LIMIT_S = 3.0
GRADES_LIMIT_S = 1.0
"""Most rewards take milliseconds; a slow one begins again elsewhere. These four stay below STOP_GRACE_S together."""


class Fenced(RuntimeError):
    """The pool has superseded this incarnation by command."""


class Incarnation:
    """See the module. `run` returns only once its `leave` is set."""

    def __init__(
        self, settings: RolloutSettings, client: PoolClient, member: Member, engine: Engine, graders: GraderPool,
        metrics: RolloutMetrics,
    ) -> None:  # fmt: skip
        self._settings, self._client, self._member = settings, client, member
        self._engine, self._graders, self._metrics = engine, graders, metrics
        self._slot = settings.common.slot
        self._assigned = Assignments(Who(self._slot, member.incarnation))
        self._state = MemberState.STARTING
        self._note = ""
        self._live: int | None = None
        """Version of the engine's weights; None while they are replaced, and when they are a mixture."""
        self._paused = False
        self._load_result: asyncio.Future[LoadResult] | None = None
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._news, self._results, self._engine_paused = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def run(self, leave: asyncio.Event) -> None:
        """Until `leave` is set: then drains and returns.

        Draining: nothing more is taken on; what was generated is handed over, so that other replicas continue it; what
        is being graded may end within GRADES_LIMIT_S. All of it fits in the 10 s that SIGTERM leaves.
        """
        async with asyncio.TaskGroup() as tasks:
            last_beat = asyncio.Event()
            beating = tasks.create_task(self._member.heartbeat_loop(self._heartbeat, until=last_beat), name="heartbeat")
            loops = [
                tasks.create_task(self._command_loop(), name="commands"),
                tasks.create_task(self._grade_loop(), name="grades"),
            ]
            flushing = tasks.create_task(self._flush_loop(), name="flush")
            working = tasks.create_task(self._work(), name="work")
            await leave.wait()
            await self._hand_over(flushing)
            last_beat.set()
            await beating  # a beat still under way must not arrive after the goodbye
            await self._say_goodbye()
            for task in (*loops, working):
                task.cancel()

    async def _work(self) -> None:
        """The engine's start, then the lease loop beside the engine's events."""
        begin = Begin(
            model_folder=str(self._settings.model_folder),
            max_running=self._settings.max_running,
            max_length=self._settings.max_length,
            emulated=self._settings.emulated,
        )
        try:
            async with asyncio.timeout(START_LIMIT_S):
                ready = await self._engine.start(begin)
        except TimeoutError:
            raise EngineExited(f"the engine has not started within {START_LIMIT_S:g} s") from None
        log.info("engine ready", extra=fields(pid=self._engine.pid, start_s=ready.start_s, length=ready.max_length))
        self._state = MemberState.IDLE
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._engine_loop(), name="engine")
            tasks.create_task(self._lease_loop(), name="lease")

    # The engine.

    async def _engine_loop(self) -> None:
        while True:
            event = await self._engine.next_event()
            match event:
                case Progress():
                    self._take(event)
                case LoadResult():
                    assert self._load_result is not None, "a load that nobody asked for"
                    self._load_result.set_result(event)
                case EngineReady() | EngineRefused():
                    raise AssertionError(f"a running engine says {event}")
                case _:
                    assert_never(event)

    def _take(self, progress: Progress) -> None:
        for block in progress.blocks:
            self._assigned.append(block)
        for ended in progress.ended:
            if (task := self._assigned.end(ended)) is not None:
                self._graders.submit(task)
        self._metrics.engine_load(progress.load)
        if progress.paused:
            self._engine_paused.set()
        self._changed()

    def _changed(self) -> None:
        """After every change of the assignments: wakes those who wait for it, and keeps them bounded."""
        if self._assigned.num_unacknowledged:
            self._all_ended.clear()
        else:
            self._all_ended.set()
        if self._state in (MemberState.IDLE, MemberState.RUNNING):
            self._state = MemberState.RUNNING if self._assigned.num_generating else MemberState.IDLE
        if self._assigned.has_results:
            self._results.set()
        if self._assigned.has_unsent:
            self._news.set()
        self._set_paused(paused=self._assigned.wants_pause(paused=self._paused))

    def _set_paused(self, *, paused: bool) -> None:
        if paused == self._paused:
            return
        self._paused = paused
        if paused:
            log.warning("paused: the pool does not take what is generated")
            self._engine.pause()
        elif self._state is not MemberState.DRAINING:
            self._engine.resume()

    # Leases.

    async def _lease_loop(self) -> None:
        while True:
            await self._all_ended.wait()
            call = LeaseCall(
                slot=self._slot, incarnation=self._member.incarnation, version=self._live,
                max_running=self._settings.max_running, wait_s=LEASE_WAIT_S,
            )  # fmt: skip
            reply = await self._client.post_msgpack("/v1/lease", call, LeaseReply, LEASE_TIMEOUT_S)
            match reply.kind:
                case LeaseKind.GRANT:
                    self._admit(reply.version, reply.groups, reply.temperature)
                case LeaseKind.REFRESH:
                    # Samples may have been adopted while the call waited.
                    await self._all_ended.wait()
                    await self._load(reply.version, reply.digest, reply.relays)
                case LeaseKind.WAIT:
                    continue
                case LeaseKind.END:
                    await asyncio.sleep(AFTER_END_S)
                case _:
                    assert_never(reply.kind)

    def _admit(self, version: int, groups: Sequence[GroupGrant], temperature: float) -> None:
        """One version a trajectory: what is to be generated with another version than the live one is handed back."""
        decline = "" if version == self._live else f"version {version} was asked for, {self._live} is loaded"
        admission = self._assigned.admit(groups, temperature, decline=decline)
        self._engine.abort(admission.aborts)
        self._engine.add(admission.requests)
        for task in admission.gradings:
            self._graders.submit(task)
        self._changed()

    async def _load(self, version: int, digest: str, relays: list[str]) -> None:
        common = self._settings.common
        before, self._live, self._state = self._live, None, MemberState.LOADING
        self._load_result = asyncio.get_running_loop().create_future()
        self._engine.load(
            Load(
                version=version, digest=digest, handoff=str(self._settings.handoff),
                handoff_kind=self._settings.handoff_kind, relays=relays, token=common.token,
                job_uid=common.job_uid, deadline_s=LOAD_WAIT_S,
            )
        )  # fmt: skip
        try:
            async with asyncio.timeout(LOAD_LIMIT_S):
                result = await self._load_result
        except TimeoutError:
            raise EngineExited(f"the engine has not answered a load within {LOAD_LIMIT_S:g} s") from None
        self._load_result = None
        self._metrics.loaded(result)
        match result.status:
            case LoadStatus.LOADED:
                self._live, self._state, self._note = version, MemberState.IDLE, ""
                log.info("loaded", extra=fields(version=version, load_s=result.load_s, copy_s=result.copy_s))
            case LoadStatus.UNAVAILABLE | LoadStatus.REFUSED:
                # Nothing was overwritten: the old weights are as good as before.
                self._live, self._state = before, MemberState.IDLE
            case LoadStatus.STALE:
                self._state = MemberState.STALE
            case _:
                assert_never(result.status)
        self._metrics.live(self._live)
        if result.status is not LoadStatus.LOADED:
            self._note = f"version {version} {result.status}: {result.detail}"
            log.warning("not loaded", extra=fields(version=version, status=result.status, reason=result.detail))
            await asyncio.sleep(AFTER_FAILURE_S)  # the relay is being replaced, or the version is on its way

    # The pool.

    async def _flush_loop(self) -> None:
        """Results at once, tokens once a second; idle, it waits for news."""
        loop = asyncio.get_running_loop()
        next_append_s = loop.time()
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                async with asyncio.timeout_at(next_append_s):
                    await self._results.wait()
                    # Whoever has nothing left to generate waits for nothing more.
                    if self._assigned.num_generating:
                        await asyncio.sleep(COALESCE_S)
            except TimeoutError:
                pass  # nothing has ended for a second: the tokens alone
            self._results.clear()
            everything = loop.time() >= next_append_s
            if everything:
                next_append_s = loop.time() + APPEND_INTERVAL_S
            await self._flush(everything=everything)
            self._changed()

    async def _flush(self, *, everything: bool, deadline_s: float | None = None) -> bool:
        """One call, if there is anything to say; False if there was not."""
        call = self._assigned.next_call(everything=everything)
        if call is None:
            return False
        reply = await self._client.post_msgpack("/v1/progress", call, ProgressReply, deadline_s=deadline_s)
        self._metrics.progress(reply)
        self._engine.abort(self._assigned.settle(call, reply))
        return True

    async def _command_loop(self) -> None:
        path, params = f"/v1/commands/{self._slot}", {"incarnation": self._member.incarnation}
        while True:
            try:
                async for command in self._client.stream_frames(path, Command, params=params):
                    self._obey(command)
            except Unreachable as error:
                log.info("the command stream broke off", extra=fields(reason=error))
            await asyncio.sleep(COALESCE_S)  # a pool that accepts and ends streams at once is not to be stormed

    def _obey(self, command: Command) -> None:
        match command.kind:
            case CommandKind.HELLO | CommandKind.PING:
                pass
            case CommandKind.ADOPT:
                self._admit(command.version, command.groups, self._settings.temperature)
            case CommandKind.CANCEL:
                self._engine.abort(self._assigned.cancel(command.ids, command.terms))
                self._changed()
            case CommandKind.FENCE:
                raise Fenced(command.reason or "fenced by the pool")
            case _:
                assert_never(command.kind)

    async def _grade_loop(self) -> None:
        while True:
            item: GradeItem = await self._graders.results.get()
            self._metrics.graded(item)
            self._assigned.grade(item)
            self._changed()

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            slot=self._slot, incarnation=self._member.incarnation, state=self._state, version=self._live,
            load=self._metrics.load, note=self._note,
        )  # fmt: skip

    # The end.

    async def _hand_over(self, flushing: asyncio.Task[None]) -> None:
        """Pauses the engine and sends what it has generated. Bounded; the pool may be away."""
        started = self._state is not MemberState.STARTING
        self._state = MemberState.DRAINING
        flushing.cancel()
        try:
            await self._client.post_json("/v1/heartbeat", self._heartbeat(), HeartbeatReply, deadline_s=GOODBYE_LIMIT_S)
            if started:
                self._engine.pause()
                async with asyncio.timeout(PAUSE_LIMIT_S):
                    await self._engine_paused.wait()
            async with asyncio.timeout(FLUSH_LIMIT_S):
                await self._flush_all()
            await self._await_grades()
        except (TimeoutError, Unreachable, Refused) as error:
            unsent_bytes = self._assigned.unsent_bytes
            log.warning("left without the pool's answer", extra=fields(reason=error, unsent_bytes=unsent_bytes))

    async def _flush_all(self) -> None:
        while await self._flush(everything=True, deadline_s=FLUSH_LIMIT_S):
            continue

    async def _await_grades(self) -> None:
        """What is not graded in time is graded again elsewhere."""
        try:
            async with asyncio.timeout(GRADES_LIMIT_S):
                while self._assigned.num_grading:
                    await self._results.wait()
                    self._results.clear()
                    await self._flush_all()
        except TimeoutError:
            log.info("responses are left to other graders", extra=fields(number=self._assigned.num_grading))

    async def _say_goodbye(self) -> None:
        self._state = MemberState.STOPPED
        try:
            await self._client.post_json("/v1/heartbeat", self._heartbeat(), HeartbeatReply, deadline_s=GOODBYE_LIMIT_S)
        except (Unreachable, Refused) as error:
            log.info("nobody heard the goodbye", extra=fields(reason=error))
