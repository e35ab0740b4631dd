"""`laminar status`: of a running pool over HTTP; else from what the run left on disk."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from laminar.cli.errors import BadInput
from laminar.cli.metering import surviving
from laminar.cli.recorders import read_driver_events
from laminar.cli.run_data import open_run
from laminar.cli.run_folder import Result, RunFolder
from laminar.cli.summary import Summary, summarise
from laminar.shell.audit import AuditReport, read_audit
from laminar.shell.blocking import BlockingClient
from laminar.shell.calls import Refused, Unreachable
from laminar.shell.ledger_file import (
    LedgerFileError,
    open_ledger,
    read_evaluations,
    read_events,
    read_meta,
    read_steps,
)
from laminar.shell.process import process_alive
from laminar.wire.messages import EvaluationRow, Event, Events, JobStatus, StepRow, Steps
from laminar.wire.spec import LaminarJob

CALL_S = 2.0
"""A pool on this machine answers within milliseconds; one that is busy with a full disk may take longer."""
WATCH_EVERY_S = 1.0
SHOWN_EVENTS = 6
MAX_EVENTS = 500


class _Endpoint(BaseModel):
    """RUN/endpoint.json."""

    url: str
    pid: int = 0
    """Of the driver."""


@dataclass(frozen=True, slots=True)
class Running:
    """The pool answered."""

    status: JobStatus
    steps: list[StepRow]
    events: list[Event]


@dataclass(frozen=True, slots=True)
class Resting:
    """No pool answers: what the ledger says. `audit` None: there is no ledger yet."""

    result: Result | None
    steps: list[StepRow]
    evaluations: list[EvaluationRow]
    events: list[Event]
    audit: AuditReport | None
    first_lease_wall_s: float
    driver_alive: bool = False
    """The pool is starting, or starting again."""

    @property
    def phase(self) -> str:
        if self.driver_alive:
            return "starting"
        return self.result.phase if self.result else "unfinished"


def look(path: Path) -> Running | Resting:
    """Where the run stands now. Raises BadInput if the folder holds no run."""
    folder, record, _ = open_run(path)
    try:
        endpoint = _Endpoint.model_validate_json(folder.endpoint_file.read_bytes())
        token = (folder.path / "token").read_text().strip()
    except (FileNotFoundError, ValidationError):
        return rest(folder)
    except PermissionError as error:
        raise BadInput(f"{error.filename} can only be read by the user who started the run.") from error
    running = _ask(endpoint.url, token, record.uid)
    if running is not None:
        return running
    return replace(rest(folder), driver_alive=endpoint.pid > 0 and process_alive(endpoint.pid))


def _ask(url: str, token: str, uid: str) -> Running | None:
    """None: nobody answers at the address that the driver left, or it is another job's pool by now."""
    try:
        with BlockingClient(url, token, uid, None, "status", random.Random(0)) as client:
            status = client.get_json("/v1/status", JobStatus, CALL_S, deadline_s=CALL_S)
            steps = _all_steps(client)
            after = max(0, status.last_event_seq - SHOWN_EVENTS)
            params = {"after": after, "limit": MAX_EVENTS}
            events = client.get_json("/v1/events", Events, CALL_S, deadline_s=CALL_S, params=params).root
    except (Unreachable, Refused):
        return None
    return Running(status, surviving(steps), events)


def _all_steps(client: BlockingClient) -> list[StepRow]:
    """The pool answers with a limited number a call. Raises Unreachable, Refused."""
    found: list[StepRow] = []
    while True:
        after = found[-1].step if found else -1
        page = client.get_json("/v1/steps", Steps, CALL_S, deadline_s=CALL_S, params={"after": after}).root
        if not page or page[-1].step <= after:
            return found
        found += page


def rest(folder: RunFolder) -> Resting:
    """From the files alone."""
    if not folder.store.is_dir():
        return Resting(folder.result(), [], [], [], None, 0.0)
    try:
        with open_ledger(folder.store) as ledger:
            first = float(read_meta(ledger).get("first_lease_wall_s", 0.0))
            steps, evaluations = surviving(read_steps(ledger)), read_evaluations(ledger)
            events = sorted([*read_events(ledger), *read_driver_events(folder)], key=lambda event: event.wall_s)
        audit = read_audit(folder.store)
    except LedgerFileError as error:
        raise BadInput(f"{folder.path} has no ledger that can be read: {error}.") from error
    return Resting(folder.result(), steps, evaluations, events[-SHOWN_EVENTS:], audit, first)


def resting_summary(job: LaminarJob, resting: Resting) -> Summary | None:
    """None without a ledger."""
    if resting.audit is None:
        return None
    return summarise(job, resting.steps, resting.evaluations, resting.audit, resting.first_lease_wall_s)


def summary_of_run(folder: RunFolder) -> Summary | None:
    """From the files alone; None if they do not tell."""
    job = folder.spec()
    try:
        return None if job is None else resting_summary(job, rest(folder))
    except BadInput:
        return None


def as_json(path: Path) -> str:
    """One object: `running`, and the fields of JobStatus as far as they are known."""
    _, record, job = open_run(path)
    found = look(path)
    if isinstance(found, Running):
        return json.dumps({"running": True, **found.status.model_dump(mode="json")})
    values: dict[str, Any] = {
        "running": False, "job": job.metadata.name, "uid": record.uid, "phase": found.phase,
        "reason": found.result.reason if found.result else "", "steps": job.spec.steps,
        "committed_step": found.audit.committed_step if found.audit else 0,
        "reward_curve": [row.reward_mean for row in found.steps],
        "last_step": found.steps[-1].model_dump(mode="json") if found.steps else None,
        "evaluations": [row.model_dump(mode="json") for row in found.evaluations],
        "counts": asdict(found.audit) if found.audit else None,
        "conditions": found.result.conditions if found.result else {},
        "skipped_prompts": found.result.skipped_prompts if found.result else {},
    }  # fmt: skip
    total = resting_summary(job, found)
    if total is not None:
        values["summary"] = {**asdict(total), "evaluations": None}
    return json.dumps(values)


def show(path: Path, *, watch: bool) -> None:
    """Prints the status once; with `watch` draws it again every second until the run ends or Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    found = look(path)
    if not watch:
        console.print(_picture(path, found, console.width))
        return
    with Live(_picture(path, found, console.width), console=console, auto_refresh=False) as live:
        while isinstance(found, Running) or found.driver_alive:
            time.sleep(WATCH_EVERY_S)  # noqa: TID251 - the picture is drawn again at this pace; Ctrl-C ends the wait
            found = look(path)
            live.update(_picture(path, found, console.width), refresh=True)


def _picture(path: Path, found: Running | Resting, width: int) -> Any:
    """What `show` prints."""
    from laminar.cli.live_panels import Screen, screen

    _, _, job = open_run(path)
    if isinstance(found, Running):
        status = found.status
        start = status.first_lease_wall_s or status.wall_s
        return screen(
            Screen(
                job=job, run_folder=path, status=status, steps=found.steps, events=found.events, note="",
                elapsed_s=max(0.0, status.wall_s - start), tokens_per_s=_pace(found.steps),
            ),
            width,
        )  # fmt: skip
    return _resting_picture(path, job, found)


def _pace(steps: list[StepRow]) -> float | None:
    """Tokens a second of the newest steps: one look has no rate of its own."""
    newest = steps[-10:]
    seconds = newest[-1].wall_s - newest[0].wall_s if len(newest) > 1 else 0.0
    return sum(row.response_tokens for row in newest[1:]) / seconds if seconds > 0 else None


def _resting_picture(path: Path, job: LaminarJob, found: Resting) -> Any:
    from rich.console import Group
    from rich.text import Text

    from laminar.cli.live_panels import event_lines
    from laminar.cli.summary import summary_tables

    say: Callable[[str], Text] = Text
    words = "its pool does not answer yet" if found.driver_alive else f"not running, {found.phase}"
    parts: list[Any] = [Text(f"{job.metadata.name}: {words}", style="bold")]
    if found.result and found.result.reason:
        parts.append(say(found.result.reason))
    total = resting_summary(job, found)
    parts += summary_tables(total) if total else [say("The pool has not written anything yet.")]
    if found.events:
        parts += [Text("last events", style="dim"), event_lines(found.events)]
    if not found.driver_alive and (found.result is None or found.result.phase == "stopped"):
        parts.append(say("The same `laminar run` command goes on from here."))
    report = path / "report.html"
    if report.is_file():
        parts.append(Text(f"report  {report}", no_wrap=True, overflow="ignore"))
    return Group(*parts)
