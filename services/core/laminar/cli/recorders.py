"""Views that write rather than show: they stand beside the one that people see."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from laminar.cli.run_folder import Result, RunFolder
from laminar.cli.tensorboard import TensorBoardView
from laminar.cli.view import View
from laminar.wire.messages import Event, JobStatus, StepRow
from laminar.wire.spec import LaminarJob

EVENTS_FILE = "events.jsonl"
MAX_EVENTS = 5_000
"""A job whose processes die for days must not fill the disk with news of it."""
DRIVER_SEQ = 0
"""The pool numbers its own events from 1 and keeps them in the ledger; the driver's have no other home."""


def attach(view: View, job: LaminarJob) -> View:
    """`view`, with the driver's events kept in the run folder, and TensorBoard files if the job asks for them."""
    recorders: list[View] = [EventLog()]
    if job.spec.loggers.tensorboard is not None:
        recorders.append(TensorBoardView())
    return Together([*recorders, view])


class EventLog:
    """RUN/events.jsonl: what the driver did. Goes on where an earlier driver of the run stopped."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._num_lines = 0

    def started(self, job: LaminarJob, run: RunFolder) -> None:
        del job
        self._file = run.path / EVENTS_FILE
        self._num_lines = len(read_driver_events(run))

    def note(self, text: str) -> None:
        del text

    def status(self, status: JobStatus) -> None:
        del status

    def events(self, events: Sequence[Event]) -> None:
        """A full disk loses these lines: they prove nothing, and the run must go on."""
        lines = [event.model_dump_json() + "\n" for event in events if event.seq == DRIVER_SEQ]
        room = MAX_EVENTS - self._num_lines
        if self._file is None or not lines or room <= 0:
            return
        try:
            with self._file.open("a") as file:
                file.writelines(lines[:room])
        except OSError:
            return
        self._num_lines += len(lines)

    def steps(self, rows: Sequence[StepRow]) -> None:
        del rows

    def ended(self, result: Result, run: RunFolder) -> None:
        del result, run


def read_driver_events(run: RunFolder) -> list[Event]:
    """In order; a last line that was cut short by a crash is left out."""
    try:
        lines = (run.path / EVENTS_FILE).read_text().splitlines()
    except FileNotFoundError:
        return []
    events: list[Event] = []
    for line in lines:
        try:
            events.append(Event.model_validate_json(line))
        except ValidationError:
            continue
    return events


class Together:
    """Several views as one, told in order."""

    def __init__(self, views: Sequence[View]) -> None:
        self._views = tuple(views)

    def started(self, job: LaminarJob, run: RunFolder) -> None:
        for view in self._views:
            view.started(job, run)

    def note(self, text: str) -> None:
        for view in self._views:
            view.note(text)

    def status(self, status: JobStatus) -> None:
        for view in self._views:
            view.status(status)

    def events(self, events: Sequence[Event]) -> None:
        for view in self._views:
            view.events(events)

    def steps(self, rows: Sequence[StepRow]) -> None:
        for view in self._views:
            view.steps(rows)

    def ended(self, result: Result, run: RunFolder) -> None:
        for view in self._views:
            view.ended(result, run)
