"""A disk that fails under a running pool: writes that the kernel refuses, and syncs that report an I/O error."""

from __future__ import annotations

import contextlib
import resource
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_pool_job import Actors, PoolProcess, get_text, until


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PoolProcess]:
    process = PoolProcess(tmp_path)
    process.start()
    yield process
    process.close()


def assert_waits_and_goes_on(pool: PoolProcess, failing: contextlib.AbstractContextManager[object]) -> None:
    """While the disk fails nobody is told anything that is not durable; afterwards everything goes on."""
    actors = Actors(pool)
    actors.start()
    actors.train(last=1)
    done = threading.Event()
    worker = threading.Thread(target=lambda: (Actors.train(actors), actors.finish(), done.set()))
    watcher = Actors(pool)
    with failing:
        worker.start()
        until(lambda: "DiskFailing" in watcher.status().conditions, 30.0)
        until(lambda: "DiskFailing" in get_text(pool, "/readyz"))
        assert not done.is_set()
        committed = watcher.status().committed_step
        assert pool.audit().violations == [], "what is on the disk is whole"
        assert pool.audit().committed_step <= committed
    worker.join(60)
    assert done.is_set()
    assert watcher.status().conditions == {}
    assert pool.audit().violations == []


@contextlib.contextmanager
def refused_writes(pid: int) -> Iterator[None]:
    """The kernel refuses every byte of a file beyond the first ones, which SQLite takes for an I/O error."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (64, before[1]))
    yield
    with contextlib.suppress(ProcessLookupError):  # it is dead
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def failing_syncs(pid: int) -> Iterator[None]:
    """Every fsync and fdatasync of the process returns EIO."""
    command = ["strace", "-f", "-q", "-q", "-p", str(pid), "-e", "trace=fsync,fdatasync", "-e",
               "inject=fsync,fdatasync:error=EIO", "-o", "/dev/null"]  # fmt: skip
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        tracer.terminate()
        assert tracer.stderr is not None
        text = tracer.stderr.read()
        tracer.stderr.close()
        tracer.wait()
        assert "attach:" not in text, text


def test_writes_that_fail_make_callers_wait_and_lose_nothing(pool: PoolProcess) -> None:
    assert pool.process is not None
    assert_waits_and_goes_on(pool, refused_writes(pool.process.pid))


@pytest.mark.root
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace makes the calls fail")
def test_syncs_that_fail_make_callers_wait_and_lose_nothing(pool: PoolProcess) -> None:
    assert pool.process is not None
    assert_waits_and_goes_on(pool, failing_syncs(pool.process.pid))


def test_a_pool_that_is_killed_while_its_disk_fails_has_lost_only_what_nobody_was_told(pool: PoolProcess) -> None:
    actors = Actors(pool)
    actors.start()
    actors.train(last=1)
    assert pool.process is not None
    with refused_writes(pool.process.pid):
        worker = threading.Thread(target=lambda: Actors.train(actors))
        worker.start()
        until(lambda: "DiskFailing" in Actors(pool).status().conditions, 30.0)
        pool.kill()
    pool.start()
    worker.join(60)
    actors.finish()
    report = pool.audit()
    assert (report.violations, report.open) == ([], 0)
