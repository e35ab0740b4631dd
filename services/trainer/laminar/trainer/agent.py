"""The trainer's agent: a service without torch, parent of torchrun, voice of the attempt towards the pool.

    start -> (torchrun runs | heartbeats) -> torchrun ends -> everything below it is killed -> exit with its result

It ends when torchrun ends, when it is asked to stop (SIGTERM goes to the ranks, which finish their step and save a
checkpoint), when the pool says that a newer attempt or life exists, or when the ranks do not get on any more
(laminar.core.progress); in the last two cases the whole group is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

from laminar.core.progress import GroupWatch, Hang
from laminar.shell.calls import Conflict, Superseded, Unknown, Unreachable
from laminar.shell.client import PoolClient
from laminar.shell.logs import fields
from laminar.shell.member import Member
from laminar.shell.memory import available_memory_bytes
from laminar.shell.process import become_subreaper, descendants, kill_descendants, stopped_descendants
from laminar.shell.service import Service
from laminar.shell.settings import Common
from laminar.trainer import launcher
from laminar.trainer.exit_note import ExitNote
from laminar.trainer.failures import EXIT_CRASH, EXIT_SUPERSEDED, TrainerFailure, paragraph
from laminar.trainer.model_folder import inspect, require_memory
from laminar.trainer.pulse import Board
from laminar.trainer.settings import TrainerSettings
from laminar.wire.messages import Heartbeat, MemberState, Register, Role
from laminar.wire.sources import local_path
from laminar.wire.spec import LaminarJob, TrainerType

log = logging.getLogger(__name__)

LOOP = "supervise"
PULSE_S = 1.0
HEALTH_LIMIT_S = 5.0
JOIN_DEADLINE_S = 5.0
"""How late the agent may notice, while it registers, that torchrun has ended."""
STOP_GRACE_S = 60.0
"""From SIGTERM until the ranks are killed: one step, one checkpoint. The driver's own grace may be shorter."""


class Agent:
    """One attempt's agent. Invariant: when `run` returns, nothing that it started is alive."""

    def __init__(self, settings: TrainerSettings, job: LaminarJob) -> None:
        self._settings = settings
        self._job = job
        self._service = Service(settings.common, title="trainer", version=version("laminar-rl"))
        self._service.watch(LOOP, HEALTH_LIMIT_S)
        self._state = MemberState.STARTING
        self._superseded = asyncio.Event()
        self._ended = asyncio.Event()
        self._hang: Hang | None = None
        self._last_words = ""

    async def run(self) -> int:
        """Returns the exit code of the process."""
        become_subreaper()
        common = self._settings.common
        client = PoolClient(common.pool_url, common.token, common.job_uid, common.generation, common.slot)
        async with client:
            code = await self._service.run(self._attempt(), self._belong(client), grace_s=STOP_GRACE_S + 10)
        if code:
            # After torchrun's own report and every log line: the end of the log is the reason.
            print(f"error: {self._last_words}", file=sys.stderr, flush=True)
        return code

    async def _attempt(self) -> None:
        """torchrun from start to end, then the process's end."""
        code = EXIT_CRASH
        try:
            if self._job.spec.trainer.type is TrainerType.TORCH:
                folder = await asyncio.to_thread(inspect, local_path(self._job.spec.model.source))
                require_memory(folder, self._job.spec.trainer.replicas, available_memory_bytes())
            code = await self._run_torchrun()
        except TrainerFailure as error:
            code, self._last_words = error.exit_code, paragraph(error)
        finally:
            # In a cancelled task too: what torchrun leaves behind must not outlive the agent.
            kill_descendants()
            self._state = MemberState.STOPPED
            self._ended.set()
            self._service.unwatch(LOOP)
        log.info("the attempt ended", extra=fields(attempt=self._settings.attempt, exit_code=code))
        self._service.stop(code)

    async def _run_torchrun(self) -> int:
        common, attempt = self._settings.common, self._settings.attempt
        ExitNote.clear(common.dir, attempt)
        trainer = self._job.spec.trainer
        num_processes = trainer.replicas if trainer.type is TrainerType.TORCH else 1
        with closing(Board(num_processes)) as board:
            process = await asyncio.create_subprocess_exec(
                *launcher.command(self._settings, trainer),
                env=launcher.environment(board.path),
                start_new_session=True,
            )
            log.info("group started", extra=fields(pid=process.pid, attempt=attempt))
            self._state = MemberState.RUNNING
            self._service.set_ready(True)
            async with asyncio.TaskGroup() as tasks:
                reaper = tasks.create_task(process.wait())
                watcher = tasks.create_task(self._end_early(process))
                await self._watch(reaper, board)
                watcher.cancel()
        return self._exit_code(reaper.result())

    async def _watch(self, reaper: asyncio.Task[int], board: Board) -> None:
        """Until torchrun has ended; a group that hangs is killed, and so it ends."""
        watch, clock = GroupWatch(), asyncio.get_running_loop().time
        while not reaper.done():
            self._service.progress(LOOP)
            hang = watch.look(clock(), board.read(), stopped_descendants(os.getpid()))
            if hang is not None and self._hang is None:
                self._hang = hang
                log.error("the group hangs and is killed", extra=fields(reason=hang.reason))
                kill_descendants()
            await asyncio.wait([reaper], timeout=PULSE_S)

    async def _end_early(self, process: asyncio.subprocess.Process) -> None:
        """Stops the group when asked to, kills it when superseded or late."""
        stopping = asyncio.create_task(self._service.stopping.wait())
        superseded = asyncio.create_task(self._superseded.wait())
        try:
            await asyncio.wait([stopping, superseded], return_when=asyncio.FIRST_COMPLETED)
            if not superseded.done():
                ask_to_stop(process.pid)
                await asyncio.wait([superseded], timeout=STOP_GRACE_S)
            kill_descendants()
        finally:
            stopping.cancel()
            superseded.cancel()

    def _exit_code(self, torchrun_code: int) -> int:
        """The rank's own code where it left one; 0 if we asked for the end; else torchrun's (128 + n for signal n)."""
        if self._superseded.is_set():
            return EXIT_SUPERSEDED  # whatever the killed ranks say
        note = ExitNote.read(self._settings.common.dir, self._settings.attempt)
        if note is not None:
            self._last_words = note.text
            return note.code
        if self._hang is not None:
            self._last_words = f"The trainer's ranks hung and were killed: {self._hang.reason}."
            return EXIT_CRASH
        if self._service.stopping.is_set():
            return 0
        code = torchrun_code if torchrun_code >= 0 else 128 - torchrun_code
        if code:
            self._last_words = f"The trainer's ranks ended without giving a reason; torchrun ended with code {code}."
        return code

    async def _belong(self, client: PoolClient) -> None:
        """Registers and sends heartbeats until torchrun has ended; a refusal ends the group."""
        member = Member(client, self._register())
        try:
            while not self._ended.is_set():
                try:
                    await member.join(deadline_s=JOIN_DEADLINE_S)
                    await member.heartbeat_loop(lambda: self._heartbeat(member), until=self._ended)
                except Unreachable:
                    log.warning("the pool does not answer the registration: trying again")
                except Unknown:
                    log.warning("the pool does not know this trainer: registering again")
        except (Superseded, Conflict) as error:
            self._last_words = f"Trainer attempt {self._settings.attempt} is superseded: {error.detail}."
            self._superseded.set()

    def _register(self) -> Register:
        common = self._settings.common
        return Register(
            slot=common.slot, role=Role.TRAINER, index=0, life=common.life, nonce="", machine=common.machine,
            pid=os.getpid(), http_address=self._service.address, attempt=self._settings.attempt,
        )  # fmt: skip

    def _heartbeat(self, member: Member) -> Heartbeat:
        return Heartbeat(slot=self._settings.common.slot, incarnation=member.incarnation, state=self._state)


def ask_to_stop(torchrun_pid: int) -> None:
    """SIGTERM to the ranks, so that torchrun sees them end in order; to torchrun itself while there are none."""
    ranks = [pid for pid in descendants(torchrun_pid) if launcher.RANK_MODULE in _command_line(pid)]
    for pid in ranks or [torchrun_pid]:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue  # it ended by itself


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


async def main(common: Common) -> int:
    """The agent's process (`laminar.shell.service.start` calls it)."""
    return await Agent(TrainerSettings.from_env(), common.load_job()).run()
