"""The run folder: what a run leaves on disk, who may use it, and whether it may go on.

    RUN/lock            flock of the driver at work; holds its pid
    RUN/job.json        uid, the job as asked for, its digest      RUN/spec.json   the resolved job, as services read it
    RUN/state.json      epoch, attempt, lives: on disk before they are used
    RUN/token           the job's secret, 0600                     RUN/endpoint.json   the pool's address while it runs
    RUN/logs/<slot>.log  RUN/slots/<slot>/  RUN/pool/  RUN/checkpoints/  RUN/machines/<i>/
    RUN/metrics.jsonl   one line a step                            RUN/result.json     how it ended
    RUN/model/          the trained model, a Hugging Face folder

Life: new -> unfinished (resumes) -> finished (prints its result); more steps, or --resume-from, make it unfinished
again; --fresh moves it aside.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import tempfile
import uuid
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from laminar.cli.errors import BadInput
from laminar.wire.job_file import diff_jobs, is_steps_upward_only, job_digest
from laminar.wire.messages import ChainMember, EvaluationRow
from laminar.wire.spec import LaminarJob

SUN_PATH_BYTES = 107
"""Longest path of a unix socket on Linux, without the closing zero."""
M = TypeVar("M", bound=BaseModel)


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class StoredMember(ChainMember):
    """A chain member with the incarnation that tells two lives of one relay apart."""

    incarnation: int


class State(_Stored):
    """What must never go back. Written with fsync before anybody is told of it."""

    epoch: int = 0
    chain: list[StoredMember] = []
    attempt: int = 0
    generation: int = 1
    lives: dict[str, int] = {}


class JobRecord(_Stored):
    """RUN/job.json."""

    uid: str
    digest: str
    requested: LaminarJob


class Result(_Stored):
    """RUN/result.json: how the newest driver of this folder ended."""

    phase: str
    reason: str
    steps: int
    committed_step: int
    wall_s: float
    reward_first: float | None = None
    """Mean training reward of the first 5 steps."""
    reward_last: float | None = None
    """Mean training reward of the last 5 steps."""
    evaluations: list[EvaluationRow] = []
    conditions: dict[str, str] = {}
    skipped_prompts: dict[str, int] = {}
    """Rows of the data files that were left out, by reason."""


class Standing(Enum):
    NEW = "new"
    UNFINISHED = "unfinished"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths and files of one run. Made by `claim`, which also takes the lock."""

    path: Path

    @property
    def spec_file(self) -> Path:
        return self.path / "spec.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def store(self) -> Path:
        return self.path / "pool"

    @property
    def endpoint_file(self) -> Path:
        return self.path / "endpoint.json"

    def log_file(self, slot: str) -> Path:
        return self.path / "logs" / f"{slot}.log"

    def slot_folder(self, slot: str) -> Path:
        return self.path / "slots" / slot

    def machine_folder(self, machine: int) -> Path:
        return self.path / "machines" / str(machine)

    def handoff_socket(self, machine: int, uid: str) -> Path:
        """In the machine's folder; in a private short folder where that path would be too long for a socket."""
        path = self.machine_folder(machine) / "handoff.sock"
        if len(os.fsencode(path)) <= SUN_PATH_BYTES:
            return path
        base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        return base / f"laminar-{os.getuid()}-{uid[:12]}" / f"{machine}.sock"

    def standing(self) -> Standing:
        """Where the run stands by its files."""
        if self.job() is None:
            return Standing.NEW
        result = self.result()
        done = result is not None and result.phase == "complete"
        return Standing.FINISHED if done else Standing.UNFINISHED

    def job(self) -> JobRecord | None:
        return _read(self.path / "job.json", JobRecord)

    def spec(self) -> LaminarJob | None:
        return _read(self.spec_file, LaminarJob)

    def state(self) -> State:
        return _read(self.path / "state.json", State) or State()

    def result(self) -> Result | None:
        return _read(self.path / "result.json", Result)

    def write_job(self, record: JobRecord, resolved: LaminarJob) -> None:
        """Last of all: a folder with job.json holds a run."""
        durable_write(self.spec_file, resolved.model_dump_json(by_alias=True, indent=1))
        durable_write(self.path / "job.json", record.model_dump_json(by_alias=True, indent=1))

    def write_state(self, state: State) -> None:
        durable_write(self.path / "state.json", state.model_dump_json(indent=1))

    def write_result(self, result: Result) -> None:
        durable_write(self.path / "result.json", result.model_dump_json(indent=1))

    def forget_result(self) -> None:
        """The run goes on: it has no end yet."""
        (self.path / "result.json").unlink(missing_ok=True)

    def write_endpoint(self, url: str) -> None:
        """Where `laminar status` and the like find the pool."""
        durable_write(self.endpoint_file, json.dumps({"url": url, "pid": os.getpid()}))

    def token(self) -> str:
        """The job's secret, made at the first call; only the owner can read it."""
        path = self.path / "token"
        if not path.exists():
            durable_write(path, secrets.token_hex(32), mode=0o600)
        return path.read_text().strip()


class Claim:
    """A locked run folder. The kernel frees the lock with the process, however it ends."""

    def __init__(self, folder: RunFolder, descriptor: int) -> None:
        self.folder = folder
        self._descriptor = descriptor

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def claim(path: Path, *, fresh: bool = False) -> Claim:
    """Takes the folder for this process; makes it if needed. `fresh`: what is there is moved aside first.

    Raises BadInput: another process runs it, it is not a run folder, or it cannot be written.
    """
    try:
        held = _lock(path)
        try:
            _refuse_strangers(path)
            if fresh and (path / "job.json").exists():
                path.rename(_free_name(path))
                held.release()
                held = _lock(path)
        except BaseException:
            held.release()
            raise
    except OSError as error:
        raise BadInput(f"The run folder {path} cannot be used: {error.strerror}. Choose another with --run.") from error
    return held


def new_record(requested: LaminarJob) -> JobRecord:
    return JobRecord(uid=str(uuid.uuid4()), digest=job_digest(requested), requested=requested)


def check_unchanged(path: Path, stored: LaminarJob, asked: LaminarJob) -> None:
    """More steps are fine; after any other change the numbers would mean nothing. Raises BadInput with the diff."""
    if stored.metadata.name != asked.metadata.name:
        raise BadInput(
            f"{path} belongs to the job '{stored.metadata.name}', not to '{asked.metadata.name}'. "
            "Choose another folder with --run, or move this run aside with --fresh."
        )
    if not is_steps_upward_only(stored, asked):
        lines = [f"  {change}" for change in diff_jobs(stored, asked)]
        raise BadInput(
            "\n".join([f"The job has changed since {path} was started:", *lines])
            + "\nOnly spec.steps may grow. Use --fresh to start over (the old run is moved aside), "
            "or --run DIR for a second run."
        )


def durable_write(path: Path, text: str, mode: int = 0o644) -> None:
    """All of `text` or none of it, also after a power failure."""
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _lock(path: Path) -> Claim:
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise BadInput(
            f"Another `laminar run` (pid {pid}) is using {path}. Wait for it, stop it with Ctrl-C, "
            "or choose another folder with --run."
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return Claim(RunFolder(path), descriptor)


def _refuse_strangers(path: Path) -> None:
    """Files that no run made are never mixed with one, or moved aside."""
    ours = {"lock", "job.json", "spec.json", "token", ".job.json.new", ".spec.json.new", ".token.new"}
    if (path / "job.json").exists():
        return
    strangers = sorted(entry.name for entry in path.iterdir() if entry.name not in ours)
    if strangers:
        (path / "lock").unlink(missing_ok=True)
        raise BadInput(
            f"{path} is not a run folder and is not empty (it holds {', '.join(strangers[:3])}). "
            "Choose another folder with --run."
        )


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    return candidate


def _read(path: Path, model: type[M]) -> M | None:
    """None: not there. Raises BadInput if it is there and makes no sense."""
    try:
        return model.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(
            f"{path} is damaged, or was written by another release of Laminar "
            f"({'.'.join(map(str, first['loc']))}: {first['msg']}). Use --fresh to start over."
        ) from error
