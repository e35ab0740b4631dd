"""Processes: children that die with their parent, and trees that are killed whole (Linux).

Two rules for whoever starts a child:

- PR_SET_PDEATHSIG fires when the parent *thread* that made the child ends, not when the parent process does.
  Start children from a thread that lives as long as the process: the main thread (asyncio's subprocess calls and
  `subprocess.Popen` fork in the thread that calls them).
- Give it `child_environment(...)`: a parent that dies before the child asked for the signal would be missed
  otherwise. A program that is not ours (torchrun) is started as `python -m laminar.shell.process PROGRAM ...`.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass

PARENT_PID = "LAMINAR_PARENT_PID"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CANNOT_FORK = "TtD"
"""Stopped, traced, or inside the kernel with the stop pending: as the parent of a vfork whose child was stopped."""
_SCAN_PAUSE_S = 0.002
"""Between two scans of /proc while processes stop: a stop takes microseconds, a scan about a millisecond."""


def die_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends; call it first thing in every child.

    Survives exec. If LAMINAR_PARENT_PID names a process that is no longer the parent, it has died already: this
    process ends here. The variable is taken out of the environment, for it is not meant for grandchildren.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    expected = os.environ.pop(PARENT_PID, None)
    if expected is not None and os.getppid() != int(expected):
        os.kill(os.getpid(), signal.SIGKILL)


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment with `variables` and LAMINAR_PARENT_PID for a child that calls `die_with_parent`."""
    return {**os.environ, **variables, PARENT_PID: str(os.getpid())}


def become_subreaper() -> None:
    """Descendants whose parent ends become children of this process, so that `kill_descendants` still finds them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


@dataclass(frozen=True, slots=True)
class _Stat:
    pid: int
    parent: int
    state: str
    start_ticks: int


def process_alive(pid: int, started_ticks: int | None = None) -> bool:
    """Whether the process runs (stopped counts, a zombie does not).

    With `started_ticks` (of `start_ticks`), another process that got the same pid later does not count.
    """
    stat = _read_stat(pid)
    if stat is None or stat.state in "ZX":
        return False
    return started_ticks is None or stat.start_ticks == started_ticks


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot: with the pid, its identity. None: no such process."""
    stat = _read_stat(pid)
    return None if stat is None else stat.start_ticks


def descendants(pid: int) -> list[int]:
    """Pids of all children, grandchildren, ... in any session, parents before children; zombies are left out."""
    return [stat.pid for stat in _descendants(pid) if stat.state not in "ZX"]


def stopped_descendants(pid: int) -> list[int]:
    """Those of `descendants` that are stopped (SIGSTOP) or held by a debugger at this moment."""
    return [stat.pid for stat in _descendants(pid) if stat.state in "Tt"]


def kill_tree(pid: int, deadline_s: float = 5.0) -> None:
    """Kills the process and all its descendants, also stopped ones and those in sessions of their own.

    They are stopped first, and /proc is read again until all are stopped and no new one appears: a process that is
    stopped cannot fork, so none escapes. Returns when all are gone (the caller still waits for its own child).
    A pid that is gone is no error. Descendants whose parent ended earlier are no longer in the tree: see
    `become_subreaper`. Raises TimeoutError with the pids that are left; they have their SIGKILL.
    """
    if pid <= 1 or pid == os.getpid():
        raise ValueError(f"pid {pid}: neither init nor this process itself can be killed as a tree")
    _kill(pid, include_root=True, deadline_s=deadline_s)


def kill_descendants(deadline_s: float = 5.0) -> None:
    """As `kill_tree`, for everything below this process. Other threads must not start processes meanwhile.

    Direct children, adopted ones included, stay zombies until the caller waits for them.
    """
    _kill(os.getpid(), include_root=False, deadline_s=deadline_s)


def _kill(root: int, *, include_root: bool, deadline_s: float) -> None:
    ends_s = time.monotonic() + deadline_s
    handles: dict[_Key, int] = {}
    parents: dict[int, int] = {}
    try:
        # The other half is left for the kill, should a process refuse to stop.
        _stop_all(root, handles, parents, include_root=include_root, ends_s=ends_s - deadline_s / 2)
        for handle in handles.values():
            _send(handle, signal.SIGKILL)
        left = _wait_until_gone(handles, ends_s)
        _reap((pid for pid, _ in handles), parents)
    finally:
        for handle in handles.values():
            os.close(handle)
    if left:
        raise TimeoutError(f"processes {left} have not ended within {deadline_s} s of SIGKILL")


_Key = tuple[int, int]
"""pid and start time."""


def _stop_all(
    root: int, handles: dict[_Key, int], parents: dict[int, int], *, include_root: bool, ends_s: float
) -> None:
    """Fills `handles` with a pidfd for each process of the tree, all stopped (or the deadline is over)."""
    while True:
        found = _descendants(root)
        if include_root and (stat := _read_stat(root)) is not None:
            found.insert(0, stat)
        settled = True
        for stat in found:
            if stat.state in "ZX":
                continue
            key = (stat.pid, stat.start_ticks)
            if key not in handles:
                handle = _open(stat)
                if handle is None:
                    continue
                handles[key] = handle
                parents[stat.pid] = stat.parent
                _send(handle, signal.SIGSTOP)
                settled = False
            elif stat.state not in _CANNOT_FORK:
                settled = False
        if settled or time.monotonic() > ends_s:
            return
        time.sleep(_SCAN_PAUSE_S)  # noqa: TID251 - /proc tells nobody when a process has stopped


def _open(stat: _Stat) -> int | None:
    """A pidfd of exactly this process; None if it ended (and perhaps another got its pid) since it was read."""
    try:
        handle = os.pidfd_open(stat.pid)
    except ProcessLookupError:
        return None
    again = _read_stat(stat.pid)
    if again is None or again.start_ticks != stat.start_ticks:
        os.close(handle)
        return None
    return handle


def _send(handle: int, sig: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(handle, sig)
    except ProcessLookupError:
        return  # it ended by itself, which is what was wanted


def _wait_until_gone(handles: dict[_Key, int], ends_s: float) -> list[int]:
    """Pids that have not ended by the deadline. A pidfd is readable once its process has ended (a zombie too)."""
    waiting = {handle: pid for (pid, _), handle in handles.items()}
    poller = select.poll()
    for handle in waiting:
        poller.register(handle, select.POLLIN)
    while waiting:
        left_ms = max(0.0, (ends_s - time.monotonic()) * 1000)
        ended = poller.poll(left_ms)
        for handle, _ in ended:
            poller.unregister(handle)
            del waiting[handle]
        if not ended:
            break
    return sorted(waiting.values())


def _reap(pids: Iterable[int], parents: dict[int, int]) -> None:
    """Collects what this process inherited as a subreaper; children of its own stay for who started them."""
    for pid in pids:
        if parents[pid] == os.getpid():
            continue
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue


def _descendants(root: int) -> list[_Stat]:
    children: dict[int, list[_Stat]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _read_stat(int(name))) is not None:
            children.setdefault(stat.parent, []).append(stat)
    found: list[_Stat] = []
    waiting = [root]
    seen = {root}
    while waiting:
        for stat in children.get(waiting.pop(0), []):
            if stat.pid not in seen:
                seen.add(stat.pid)
                found.append(stat)
                waiting.append(stat.pid)
    return found


def _read_stat(pid: int) -> _Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            data = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name may hold spaces and brackets; the fields after its last bracket are fixed (man 5 proc).
    rest = data[data.rindex(b")") + 2 :].split()
    return _Stat(pid=pid, parent=int(rest[1]), state=rest[0].decode(), start_ticks=int(rest[19]))


def main(argv: list[str]) -> None:
    """`python -m laminar.shell.process PROGRAM ARGUMENT...`: becomes PROGRAM, which dies with its parent."""
    if not argv:
        raise SystemExit("usage: python -m laminar.shell.process PROGRAM ARGUMENT...")
    die_with_parent()
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main(sys.argv[1:])
