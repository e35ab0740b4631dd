"""The processes of an embedded run: started, watched and ended, with everything below them.

Each child gets a session of its own (a Ctrl-C in the terminal reaches only the driver), appends what it prints to its
slot's log, and inherits the listening sockets of its slot, which the driver keeps open: whoever connects while a
child is replaced waits in the queue and is not refused. Nothing outlives its child: what a dead child leaves behind
is found by the slot and life in its environment, and killed before the exit is reported.

Use from the main thread only (the kernel ties a child's life to the thread that started it), and let nobody else in
this process start children meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from laminar.shell.process import child_environment, kill_tree, process_alive

TAIL_BYTES = 16 * 1024
_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\dT\S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")


@dataclass(frozen=True, slots=True)
class Launch:
    """One life of one slot. `variables` are added to this process's environment."""

    slot: str
    life: int
    command: tuple[str, ...]
    variables: Mapping[str, str]
    sockets: tuple[int, ...]
    """Descriptors that the child inherits under the same numbers."""
    log: Path


class Child:
    """A started process. `code` is None while it runs; negative: ended by that signal."""

    def __init__(self, launch: Launch, process: subprocess.Popen[bytes], started_s: float, log_offset: int) -> None:
        self.launch = launch
        self.pid = process.pid
        self.started_s = started_s
        self.ended_s: float | None = None
        self.code: int | None = None
        self.stopping_since_s: float | None = None
        self.killed = False
        """We ended it."""
        self._process = process
        self._log_offset = log_offset

    @property
    def slot(self) -> str:
        return self.launch.slot

    @property
    def life(self) -> int:
        return self.launch.life

    def collect(self) -> int | None:
        """The exit code once the process has ended."""
        return self._process.poll()

    def last_words(self) -> str:
        """What it printed last, for people: its last paragraph, or its last line if that was a log line."""
        return last_words(self.launch.log, self._log_offset)


class Children:
    """All processes of one run. `woken` is called (in the event loop) when one has ended: then await `settle`."""

    def __init__(self, job_uid: str, clock: Callable[[], float], woken: Callable[[], None]) -> None:
        self._job_uid = job_uid
        self._clock = clock
        self._woken = woken
        self._running: dict[int, Child] = {}
        self._pidfds: dict[int, int] = {}
        self._ended: list[Child] = []

    @property
    def running(self) -> tuple[Child, ...]:
        return tuple(self._running.values())

    def start(self, launch: Launch) -> Child:
        """Raises OSError when the process cannot be made."""
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        with launch.log.open("ab") as log:
            offset = log.tell()
            process = subprocess.Popen(
                launch.command,
                env=child_environment(**launch.variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=launch.sockets,
                start_new_session=True,
            )
        child = Child(launch, process, self._clock(), offset)
        self._running[child.pid] = child
        pidfd = os.pidfd_open(child.pid)
        self._pidfds[child.pid] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._has_ended, child)
        return child

    def stop(self, child: Child) -> None:
        """SIGTERM: flush and leave."""
        if child.stopping_since_s is None:
            child.stopping_since_s = self._clock()
        self._signal(child, signal.SIGTERM)

    async def kill(self, child: Child) -> None:
        """SIGKILL to it and everything below it, stopped processes too. Returns when they are gone."""
        child.killed = True
        if child.code is None:
            await asyncio.to_thread(kill_tree, child.pid)

    async def settle(self) -> list[Child]:
        """The children that have ended since the last call, after what they left behind is gone as well."""
        ended, self._ended = self._ended, []
        for child in ended:
            await asyncio.to_thread(self._clear, child.slot, child.life)
        self._reap_orphans()
        return ended

    async def end_all(self) -> None:
        """Kills every child, and every process of this job wherever it hangs. Afterwards none is left."""
        for child in self.running:
            await self.kill(child)
        await asyncio.to_thread(self._clear, None, None)
        self._reap_orphans()

    def left_over(self) -> list[int]:
        """Processes of this job that are not children we know: at the end of a run there is none."""
        return [pid for pid in processes_of(self._job_uid) if pid not in self._running]

    def _has_ended(self, child: Child) -> None:
        code = child.collect()
        if code is None:
            return
        pidfd = self._pidfds.pop(child.pid)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        del self._running[child.pid]
        child.code = code
        child.ended_s = self._clock()
        self._ended.append(child)
        self._woken()

    def _signal(self, child: Child, number: signal.Signals) -> None:
        pidfd = self._pidfds.get(child.pid)
        if pidfd is None:
            return
        try:
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return  # it has ended; its exit is about to be seen

    def _clear(self, slot: str | None, life: int | None) -> None:
        for pid in processes_of(self._job_uid, slot, life):
            kill_tree(pid)

    def _reap_orphans(self) -> None:
        """Collects what we inherited as a subreaper, but no child of our own before its exit is seen."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid in self._running:
                return
            os.waitpid(found.si_pid, os.WNOHANG)


def processes_of(job_uid: str, slot: str | None = None, life: int | None = None) -> list[int]:
    """Living processes that were started for this job (slot, life), by their environment; never this one."""
    wanted = {f"LAMINAR_JOB_UID={job_uid}".encode()}
    if slot is not None:
        wanted |= {f"LAMINAR_SLOT={slot}".encode(), f"LAMINAR_LIFE={life}".encode()}
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended meanwhile, or belongs to somebody else and so is not ours
        if wanted <= set(variables) and process_alive(int(entry)):
            found.append(int(entry))
    return found


def last_words(log: Path, offset: int = 0) -> str:
    """The last paragraph that is not a log line, else the last line; `offset` bytes were there before this life."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(offset, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return final_paragraph(text.splitlines())


def final_paragraph(lines: Sequence[str]) -> str:
    """The lines at the end that belong together, joined; the `error:` that services print first is left out."""
    kept: list[str] = []
    for line in reversed(lines):
        if not line.strip():
            if kept:
                break
            continue
        if _LOG_LINE.match(line):
            if not kept:
                kept.append(line.strip())
            break
        kept.append(line.strip())
    # Of a traceback only the last line says something to people.
    if any(line.startswith("Traceback ") for line in kept):
        kept = kept[:1]
    return " ".join(reversed(kept)).removeprefix("error: ")
