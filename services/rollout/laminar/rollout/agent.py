"""The agent of a rollout replica: keeps one incarnation after the other alive, and the graders across them.

register -> Incarnation.run -> (engine gone | superseded | fenced) -> kill the engine -> register anew ...
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import cast

from laminar.core.reconcile import EXIT_BAD_INPUT
from laminar.rollout.engine import Engine, EngineExited, EngineProcess, UnservableModel
from laminar.rollout.grader_messages import GraderSetup
from laminar.rollout.grading import GraderPool
from laminar.rollout.incarnation import Fenced, Incarnation
from laminar.rollout.metrics import RolloutMetrics
from laminar.rollout.settings import RolloutSettings
from laminar.shell.calls import Superseded, Unknown
from laminar.shell.client import PoolClient
from laminar.shell.logs import fields
from laminar.shell.member import Member
from laminar.shell.service import Service
from laminar.wire.messages import Register, Role

log = logging.getLogger(__name__)

Spawn = Callable[[], Awaitable[Engine]]

FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 5.0
"""An engine that ends again and again is started again at this pace; each start costs seconds of a core anyway."""
GOOD_LIFE_S = 30.0
"""An incarnation that has lived this long does not count as a failed start."""


class Agent:
    """Owned by `__main__`, run by the service's task group."""

    def __init__(
        self, settings: RolloutSettings, service: Service, client: PoolClient, spawn: Spawn = EngineProcess.spawn
    ) -> None:
        self._settings, self._service, self._client, self._spawn = settings, service, client, spawn
        self._metrics = RolloutMetrics(service.registry)
        setup = GraderSetup(
            rules=list(settings.rules), tokenizer=str(settings.tokenizer), eos_ids=sorted(settings.eos_ids)
        )
        self._graders = GraderPool(setup, settings.num_graders)
        self.last_words = ""
        """Why another life would not help, for people; empty while it would."""
        service.watch("agent", limit_s=5.0)

    async def run(self) -> None:
        """Until the service stops; then flushes and returns."""
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._graders.run()), tasks.create_task(self._pulse())]
            await self._live_on()
            for task in background:
                task.cancel()

    async def _pulse(self) -> None:
        """Health is that this loop turns: an agent that waits for its pool or engine is well."""
        while True:
            self._service.progress("agent")
            await asyncio.sleep(1.0)

    async def _live_on(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while not self._service.stopping.is_set():
            born_s = loop.time()
            try:
                await self._live()
            except* (EngineExited, Fenced, Superseded, Unknown) as group:
                log.warning("incarnation ended", extra=fields(reason=_reasons(group)))
            except* UnservableModel as group:
                log.error("the engine cannot serve this model", extra=fields(reason=_reasons(group)))
                self.last_words = _reasons(group, named=False)
                self._service.stop(EXIT_BAD_INPUT)
            if loop.time() - born_s > GOOD_LIFE_S:
                pause_s = FIRST_PAUSE_S
            await self._service.wait(self._service.stopping.wait(), pause_s)
            pause_s = min(LAST_PAUSE_S, 2 * pause_s)

    async def _live(self) -> None:
        """One incarnation, from its registration to the death of its engine."""
        self._graders.clear()
        self._metrics.live(None)
        common = self._settings.common
        register = Register(
            slot=common.slot, role=Role.ROLLOUT, index=self._settings.index, life=common.life, nonce="",
            machine=common.machine, pid=os.getpid(), http_address=self._service.address,
        )  # fmt: skip
        member = Member(self._client, register)
        # The engine takes seconds to start; registration needs none of it.
        engine = await self._spawn()
        self._metrics.engine_started()
        try:
            joined = await self._service.wait(member.join(), wait_s=float("inf"))
            if joined is None:
                return
            log.info("registered", extra=fields(incarnation=joined, engine_pid=engine.pid))
            incarnation = Incarnation(self._settings, self._client, member, engine, self._graders, self._metrics)
            self._service.set_ready(True)
            await incarnation.run(self._service.stopping)
        finally:
            self._service.set_ready(False, "the engine is being replaced")
            await engine.kill()


def _reasons(group: BaseExceptionGroup[BaseException], *, named: bool = True) -> str:
    """One line: what the leaves of a group say, each with its type if `named`."""
    leaves: list[BaseException] = []
    waiting: list[BaseException] = [group]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting += cast(BaseExceptionGroup[BaseException], error).exceptions
        else:
            leaves.append(error)
    texts = (f"{type(error).__name__}: {error}" if named else " ".join(str(error).split()) for error in leaves)
    return "; ".join(dict.fromkeys(texts))
