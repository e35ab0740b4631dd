"""Children that die with their parent, and trees that are killed whole, with real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from laminar.shell import process

DEADLINE_S = 20.0

# A node makes two children of its own, each in a session of its own, down to the given depth, then writes its pid.
TREE = """
import os, subprocess, sys, signal
depth, path = int(sys.argv[1]), sys.argv[2]
if depth:
    for _ in range(2):
        subprocess.Popen([sys.executable, __file__, str(depth - 1), path], start_new_session=True)
with open(path, "a") as file:
    file.write(f"{os.getpid()}\\n")
if depth == 0 and os.getpid() % 2:
    os.kill(os.getpid(), signal.SIGSTOP)
signal.pause()
"""

# Forks without end: each child lives on and forks as well, up to a limit of depth that no test waits for.
FORKER = """
import os, time
children = 0
while children < 200:
    if os.fork() == 0:
        os.setsid()
        children += 190
    children += 1
    time.sleep(0.002)
while True:
    time.sleep(100)
"""

# Starts a child that asks to die with it, and says its pid.
PARENT = """
import subprocess, sys, signal
from laminar.shell.process import child_environment
child = subprocess.Popen([sys.executable, "-m", "laminar.shell.process", "sleep", "1000"], env=child_environment())
print(child.pid, flush=True)
signal.pause()
"""


def eventually(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < ends_s, "the condition did not become true"
        time.sleep(0.01)


@pytest.fixture
def spawned() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for child in processes:
        if child.poll() is None:
            process.kill_tree(child.pid)
            child.wait()
        if child.stdout is not None:
            child.stdout.close()


def spawn(spawned: list[subprocess.Popen[bytes]], *argv: str, **more: object) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, *argv], **more)  # type: ignore[call-overload]
    spawned.append(child)
    return child


def test_a_tree_is_killed_with_its_sessions_and_its_stopped_processes(
    tmp_path: Path, spawned: list[subprocess.Popen[bytes]]
) -> None:
    script, pids = tmp_path / "tree.py", tmp_path / "pids"
    script.write_text(TREE)
    root = spawn(spawned, str(script), "2", str(pids))
    eventually(lambda: pids.exists() and len(pids.read_text().splitlines()) == 7)
    tree = [int(line) for line in pids.read_text().splitlines()]
    assert sorted(process.descendants(root.pid)) == sorted(set(tree) - {root.pid})
    process.kill_tree(root.pid)
    assert root.wait(DEADLINE_S) == -signal.SIGKILL
    assert [pid for pid in tree if process.process_alive(pid)] == []


def test_a_tree_that_forks_meanwhile_loses_every_process(spawned: list[subprocess.Popen[bytes]]) -> None:
    root = spawn(spawned, "-c", FORKER)
    eventually(lambda: len(process.descendants(root.pid)) > 10)
    marker = f"/proc/{root.pid}/cmdline"
    command = Path(marker).read_bytes()
    process.kill_tree(root.pid)
    root.wait(DEADLINE_S)
    left = [pid for pid in pids_now() if cmdline(pid) == command and process.process_alive(pid)]
    assert left == []


def pids_now() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_a_tree_that_starts_processes_without_end_is_killed_at_any_moment(
    spawned: list[subprocess.Popen[bytes]],
) -> None:
    code = "import subprocess\nwhile True: subprocess.run(['true'])"  # by vfork: the parent waits inside the kernel
    for _ in range(5):
        root = spawn(spawned, "-c", code)
        eventually(lambda pid=root.pid: bool(process.descendants(pid)))
        process.kill_tree(root.pid, deadline_s=DEADLINE_S)
        root.wait(DEADLINE_S)


def test_a_process_that_is_gone_is_no_error(spawned: list[subprocess.Popen[bytes]]) -> None:
    child = spawn(spawned, "-c", "pass")
    child.wait(DEADLINE_S)
    process.kill_tree(child.pid)


def test_init_and_the_caller_itself_are_refused() -> None:
    for pid in (-1, 0, 1, os.getpid()):
        with pytest.raises(ValueError, match="can be killed as a tree"):
            process.kill_tree(pid)


def test_a_child_dies_when_its_parent_is_killed(spawned: list[subprocess.Popen[bytes]]) -> None:
    parent = spawn(spawned, "-c", PARENT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    eventually(lambda: cmdline(child).startswith(b"sleep"))
    parent.kill()
    eventually(lambda: not process.process_alive(child))


def test_a_child_whose_parent_died_before_it_asked_ends_itself(spawned: list[subprocess.Popen[bytes]]) -> None:
    gone = spawn(spawned, "-c", "pass")
    gone.wait(DEADLINE_S)
    environ = {**os.environ, process.PARENT_PID: str(gone.pid)}
    child = spawn(spawned, "-m", "laminar.shell.process", "sleep", "1000", env=environ)
    assert child.wait(DEADLINE_S) == -signal.SIGKILL


def test_the_parents_pid_is_not_passed_on_to_grandchildren(spawned: list[subprocess.Popen[bytes]]) -> None:
    child = spawn(
        spawned, "-m", "laminar.shell.process", "env", env=process.child_environment(MARK="1"), stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    lines = child.stdout.read().decode().splitlines()
    assert "MARK=1" in lines
    assert not [line for line in lines if line.startswith(process.PARENT_PID)]


def test_a_stopped_process_is_alive_and_a_zombie_is_not(spawned: list[subprocess.Popen[bytes]]) -> None:
    child = spawn(spawned, "-c", "import signal; signal.pause()")
    ticks = process.start_ticks(child.pid)
    child.send_signal(signal.SIGSTOP)
    assert process.process_alive(child.pid, ticks)
    assert ticks is not None and not process.process_alive(child.pid, ticks + 1)
    handle = os.pidfd_open(child.pid)
    try:
        child.kill()
        assert select.select([handle], [], [], DEADLINE_S)[0]
        assert not process.process_alive(child.pid)
    finally:
        os.close(handle)


def test_a_subreaper_kills_orphans_too(spawned: list[subprocess.Popen[bytes]]) -> None:
    code = """
import os, subprocess, sys
from laminar.shell.process import become_subreaper, descendants, kill_descendants, process_alive
become_subreaper()
# The middle process ends at once; its child, in a session of its own, is an orphan.
middle = subprocess.run([sys.executable, "-c",
    "import subprocess;"
    "print(subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=subprocess.DEVNULL).pid)"],
    stdout=subprocess.PIPE, text=True)
assert descendants(os.getpid()) == [int(middle.stdout)]
kill_descendants()
print(process_alive(int(middle.stdout)), descendants(os.getpid()))
kill_descendants()  # nothing is left: no error
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.stdout, done.stderr, done.returncode) == ("False []\n", "", 0)
