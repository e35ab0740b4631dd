"""The agent's side of grading: a small pool of killable workers.

A response is graded rule by rule, each with its own wall-clock limit. A worker that exceeds it is killed with all it
has started, and a fresh one takes its place. A failure of any kind is tried again, and in the end means "ungraded":
never a reward of 0.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress

import msgspec

from laminar.core.grading import TryBudget
from laminar.rollout.channel import ChannelClosed, SpawnedChild, read_frame, spawn_child
from laminar.rollout.grader_messages import GradeAnswer, GradeCall, GraderEvent, GraderReady, GraderSetup, GradeTask
from laminar.rollout.rewards import combined
from laminar.shell.logs import fields
from laminar.shell.process import child_environment, kill_tree
from laminar.wire.codec import frame
from laminar.wire.dataplane import GradeItem

log = logging.getLogger(__name__)

START_LIMIT_S = 60.0
"""Imports of math-verify or of the user's module, on a busy machine."""
_SECRET = "LAMINAR_TOKEN"
_DECODER = msgspec.msgpack.Decoder(GraderEvent)


class GradingFailed(Exception):
    """One try did not give a value; the text says why."""


class GradingHung(GradingFailed):
    """It had not ended when its time was over."""


class GraderPool:
    """`submit` tasks; take `results`. The owner runs `run` in its task group, and cancels it to end the workers.

    Bounded by its caller: an agent submits what it was granted, once.
    """

    def __init__(self, setup: GraderSetup, num_workers: int = 1) -> None:
        self._setup = setup
        self._num_workers = num_workers
        self._tasks: asyncio.Queue[GradeTask] = asyncio.Queue()
        self.results: asyncio.Queue[GradeItem] = asyncio.Queue()
        self._budget = TryBudget()
        self.num_killed = 0
        """Workers killed for exceeding their time, or found dead."""

    def submit(self, task: GradeTask) -> None:
        """A response without an end of sequence is worth 0 by definition and needs no worker."""
        if task.finish_reason == "length":
            parts = {rule.name: 0.0 for rule in self._setup.rules}
            item = GradeItem(id=task.key.sample, term=task.key.term, status="ok", reward=0.0, parts=parts)
            self.results.put_nowait(item)
        else:
            self._tasks.put_nowait(task)

    def clear(self) -> None:
        """Forgets what waits; what is being graded still answers."""
        while not self._tasks.empty():
            self._tasks.get_nowait()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(self._num_workers):
                group.create_task(self._work(), name=f"grader-{index}")

    async def _work(self) -> None:
        """One worker's life after life: started ahead of the first task, and again after each death."""
        worker: _Worker | None = None
        try:
            worker = await self._start_or_none()
            while True:
                task = await self._tasks.get()
                try:
                    worker = worker or await _Worker.start(self._setup)
                    await self._grade(worker, task)
                    self._budget.observe(hung=False)
                except GradingFailed as error:
                    self._budget.observe(hung=isinstance(error, GradingHung))
                    self._retry(task, str(error))
                if worker is not None and worker.dead:
                    self.num_killed += 1
                    await worker.kill()
                    worker = await self._start_or_none()
        finally:
            if worker is not None:
                await worker.kill()

    async def _start_or_none(self) -> _Worker | None:
        """Ahead of need; a start that fails is tried again, and reported, when there is a task."""
        try:
            return await _Worker.start(self._setup)
        except GradingFailed as error:
            log.warning("no grader yet", extra=fields(reason=error))
            return None

    async def _grade(self, worker: _Worker, task: GradeTask) -> None:
        for index, rule in enumerate(self._setup.rules):
            if rule.name not in task.parts:
                call = GradeCall(rule=index, prompt=task.prompt, tokens=task.tokens, answer=task.answer)
                try:
                    task.parts[rule.name] = await worker.grade(call, rule.timeout_s)
                except GradingFailed as error:
                    raise type(error)(f"reward {rule.name}: {error}") from error
        reward = combined(self._setup.rules, task.parts)
        self.results.put_nowait(
            GradeItem(id=task.key.sample, term=task.key.term, status="ok", reward=reward, parts=task.parts)
        )

    def _retry(self, task: GradeTask, failure: str) -> None:
        task.failures.append(failure)
        if len(task.failures) < self._budget.num_tries:
            # Behind what waits: another worker may take it.
            self._tasks.put_nowait(task)
            return
        log.warning("ungraded", extra=fields(sample=task.key.sample, reason=failure))
        self.results.put_nowait(
            GradeItem(id=task.key.sample, term=task.key.term, status="ungraded", detail=failure, parts=task.parts)
        )


class _Worker:
    """One child. Once `dead`, only `kill` is of use."""

    def __init__(self, child: SpawnedChild) -> None:
        self._child = child
        self.dead = False

    @classmethod
    async def start(cls, setup: GraderSetup) -> _Worker:
        """Raises GradingFailed if it does not get ready."""
        environment = child_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
        # It runs the user's code, which has no business with the job's token.
        environment.pop(_SECRET, None)
        command = [sys.executable, "-m", "laminar.rollout.grader"]
        worker = cls(await spawn_child(command, environment, own_process_group=True))
        try:
            event = await worker._ask(setup, START_LIMIT_S)
        except BaseException:
            await worker.kill()
            raise
        assert isinstance(event, GraderReady), event
        return worker

    async def grade(self, call: GradeCall, timeout_s: float) -> float:
        answer = await self._ask(call, timeout_s)
        assert isinstance(answer, GradeAnswer), answer
        if answer.error:
            raise GradingFailed(answer.error)
        return answer.value

    async def kill(self) -> None:
        """It, its descendants in any session, and what is left of its process group."""
        self._child.writer.close()
        pid = self._child.process.pid
        if self._child.process.returncode is None:
            # The tree first: once its parents are gone, a process in a session of its own is not found any more.
            await asyncio.to_thread(kill_tree, pid)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        await self._child.process.wait()

    async def _ask(self, message: GraderSetup | GradeCall, timeout_s: float) -> GraderEvent:
        self._child.writer.write(frame(message))
        try:
            async with asyncio.timeout(timeout_s):
                return _DECODER.decode(await read_frame(self._child.reader))
        except TimeoutError:
            self.dead = True
            raise GradingHung(f"not done within {timeout_s:g} s; the grader was killed") from None
        except (ChannelClosed, ValueError) as error:
            self.dead = True
            raise GradingFailed(f"the grader ended before it had answered ({error})") from None
