"""A whole job as a user runs it: `laminar run` in a process of its own, real services, real kills.

The model is the example's (warmed up once, then cached); the batches are small, so that a step takes a fraction of a
second and faults hit every phase of it.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from laminar.shell.process import kill_tree

ROOT = Path(__file__).resolve().parents[2]
JOB = """
apiVersion: laminar.dev/v1alpha1
kind: LaminarJob
metadata: {name: faults}
spec:
  steps: 40
  model: {source: recipe://arithmetic-tiny}
  data: {train: {source: recipe://chain-sum, promptField: question, answerField: answer}}
  rewards: [{name: answer, type: exact, extract: {tag: answer}}]
  sampling: {maxResponseTokens: 160}
  algorithm: {loss: grpo, promptsPerStep: 8, samplesPerPrompt: 8, learningRate: 1.0e-4}
  trainer: {replicas: 1, checkpoint: {everySteps: 4, keep: 3}}
  rollout: {replicas: 2, engine: {type: torch}}
"""
SETTLE_S = 60.0
"""Longest that any single thing is waited for; a busy machine of two cores needs some of it."""
POLL = threading.Event()
"""Never set: `POLL.wait(s)` paces the reading of a condition."""


def until(what: str, condition: Callable[[], Any], timeout_s: float = SETTLE_S) -> Any:
    """The first true value of `condition`; fails, naming `what`, when there is none in time."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline_s, f"waited {timeout_s:.0f} s in vain for: {what}"
        POLL.wait(0.05)


def processes_of(uid: str) -> dict[int, str]:
    """pid -> command line of every process that carries this job's uid in its environment, zombies left out."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            belongs = f"LAMINAR_JOB_UID={uid}".encode() in (entry / "environ").read_bytes().split(b"\0")
            if belongs and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def shared_memory_names() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


class JobRun:
    """One run folder, driven through the command line. `start` may be called again after an end: it resumes."""

    def __init__(self, folder: Path, job: str = JOB) -> None:
        self.folder = folder
        self.job_file = folder.parent / "job.yaml"
        self.job_file.write_text(job)
        self.driver: subprocess.Popen[str] | None = None
        self.output: list[dict[str, Any]] = []
        self.stderr_file = folder.parent / "driver.stderr"
        self._reader: threading.Thread | None = None
        self._shared_before = shared_memory_names()

    def start(self, *arguments: str) -> JobRun:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        command = [sys.executable, "-m", "laminar.cli", "run", str(self.job_file), "--run", str(self.folder), "--json"]
        with self.stderr_file.open("a") as stderr:
            self.driver = subprocess.Popen(
                [*command, *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
            )
        self._reader = threading.Thread(target=self._read, args=(self.driver,), daemon=True)
        self._reader.start()
        return self

    def _read(self, driver: subprocess.Popen[str]) -> None:
        assert driver.stdout is not None
        with driver.stdout:
            for line in driver.stdout:
                self.output.append(json.loads(line))

    @property
    def uid(self) -> str:
        return str(json.loads((self.folder / "job.json").read_text())["uid"])

    def status(self, timeout_s: float = 5.0) -> dict[str, Any] | None:
        """The pool's status; None while it does not answer."""
        try:
            endpoint = json.loads((self.folder / "endpoint.json").read_text())
            request = urllib.request.Request(f"{endpoint['url']}/v1/status")
            request.add_header("authorization", f"Bearer {(self.folder / 'token').read_text().strip()}")
            request.add_header("laminar-job", self.uid)
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return dict(json.load(answer))
        except (OSError, ValueError, KeyError):
            return None

    def committed(self) -> int:
        status = self.status()
        return status["committed_step"] if status else -1

    def wait_step(self, step: int, timeout_s: float = SETTLE_S) -> None:
        """At least this many steps are committed."""
        until(f"step {step}", lambda: self.committed() >= step, timeout_s)

    def member(self, slot: str) -> dict[str, Any] | None:
        status = self.status()
        rows = [m for m in status["members"] if m["slot"] == slot] if status else []
        return max(rows, key=lambda m: m["incarnation"]) if rows else None

    def pid(self, slot: str) -> int:
        """Of the slot's agent process (pool-0 and relays: their only one)."""
        service = slot.rpartition("-")[0]
        return self.process(f"-m laminar.{service} ", f"LAMINAR_SLOT={slot}")

    def process(self, command: str, variable: str = "") -> int:
        """The one process of this job whose command line contains `command` (and whose environment has `variable`)."""
        return int(until(f"a process {command} {variable}", lambda: self.pids(command, variable))[0])

    def pids(self, command: str, variable: str = "") -> list[int]:
        """Of the processes that `process` looks for, those that are there now."""
        found: list[int] = []
        for pid, line in processes_of(self.uid).items():
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if command in line and (not variable or variable.encode() in environ):
                found.append(pid)
        return found

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(pid, number)

    def events(self, kind: str = "") -> list[str]:
        return [line["text"] for line in self.output if line["type"] == "event" and kind in line["kind"]]

    def pool_events(self) -> list[tuple[str, str]]:
        """(kind, text) of everything that the pool ever told of this run."""
        with sqlite3.connect(self.folder / "pool" / "ledger.sqlite") as ledger:
            events = ledger.execute("SELECT kind, text FROM events ORDER BY seq").fetchall()
        ledger.close()
        return events

    def assert_no_alarm(self) -> None:
        """Nothing failed, so nobody was told that something did."""
        alarms = {"suspect", "redirect", "stalled", "fence", "failed", "ungraded"}
        assert [text for kind, text in self.pool_events() if kind in alarms] == []

    def wait_end(self, timeout_s: float = 240.0) -> int:
        """The driver's exit code."""
        assert self.driver is not None and self._reader is not None
        try:
            code = self.driver.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the run did not end in {timeout_s:.0f} s; status {self.status()}")
        self._reader.join(10)
        return code

    def audit(self) -> dict[str, Any]:
        """What `laminar audit` says; fails on any violation."""
        command = [sys.executable, "-m", "laminar.cli", "audit", str(self.folder), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        report = json.loads(done.stdout)
        assert done.returncode == 0 and not report["violations"], report
        return dict(report)

    def assert_complete_and_clean(self, steps: int = 40) -> dict[str, Any]:
        """The run ended, nothing lost, nothing twice, nothing left behind."""
        code = self.wait_end()
        assert code == 0, self.stderr_file.read_text()[-2000:] + str(self.output[-3:])
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, steps + 1))
        self.assert_nothing_left()
        return self.audit()

    def assert_nothing_left(self) -> None:
        """No process, no name in shared memory, no listening port."""
        until(f"no process is left: {processes_of(self.uid)}", lambda: not processes_of(self.uid), 10)
        assert shared_memory_names() <= self._shared_before
        url = json.loads((self.folder / "endpoint.json").read_text())["url"] if self._has_endpoint() else ""
        if url:
            with pytest.raises(OSError):
                urllib.request.urlopen(f"{url}/healthz", timeout=2)

    def _has_endpoint(self) -> bool:
        return (self.folder / "endpoint.json").exists()

    def close(self) -> None:
        """Ends what a failed test left running."""
        if self.driver is not None and self.driver.poll() is None:
            kill_tree(self.driver.pid)
            self.driver.wait(10)
        if self._reader is not None:
            self._reader.join(10)
        if (self.folder / "job.json").exists():
            for pid in processes_of(self.uid):
                kill_tree(pid)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[JobRun]:
    run = JobRun(tmp_path / "run")
    yield run
    run.close()


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., JobRun]]:
    """Several runs, or one with a job of its own."""
    runs: list[JobRun] = []

    def make(job: str = JOB, name: str = "run") -> JobRun:
        (tmp_path / name).mkdir(exist_ok=True)
        runs.append(JobRun(tmp_path / name / "run", job))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def command_line(*arguments: object, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """`laminar ARGUMENTS...` from start to end. People never see a traceback, whatever they do."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "laminar.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done


@pytest.fixture(name="laminar")
def laminar_fixture() -> Callable[..., subprocess.CompletedProcess[str]]:
    return command_line


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two Hugging Face folders of random weights: `plain`, and `chat` with a chat template."""
    folder = tmp_path_factory.mktemp("models")
    script = Path(__file__).with_name("make_tiny_model.py")
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True, timeout=120)
    return folder


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Any]:
    return until
