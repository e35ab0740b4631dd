"""TensorBoard event files of a run (RUN/tensorboard), when the job asks for them: a View beside the one people see."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from laminar.cli.formats import histogram_mean
from laminar.cli.run_folder import Result, RunFolder
from laminar.wire.messages import Event, JobStatus, StepRow
from laminar.wire.spec import LaminarJob

FOLDER = "tensorboard"


class TensorBoardView:
    """Scalars at their training step: a step trained again by a later attempt is written again, and TensorBoard shows
    the newer one."""

    def __init__(self) -> None:
        self._writer: Any = None
        self._record: Any = None
        self._summary: Any = None
        self._evaluations: set[tuple[str, str, str]] = set()

    def started(self, job: LaminarJob, run: RunFolder) -> None:
        del job
        # Takes half a second and is rarely needed. The protobuf modules have no types.
        load = importlib.import_module
        self._writer = load("tensorboard.summary.writer.event_file_writer").EventFileWriter(str(run.path / FOLDER))
        self._record = load("tensorboard.compat.proto.event_pb2").Event
        self._summary = load("tensorboard.compat.proto.summary_pb2").Summary

    def note(self, text: str) -> None:
        del text

    def status(self, status: JobStatus) -> None:
        """Evaluations, once each, when they have ended."""
        going_on = {"evaluatingFirst": "first", "evaluatingLast": "last"}.get(status.phase.value)
        for row in status.evaluations:
            key = (row.name, row.mode, row.point)
            if key not in self._evaluations and row.point != going_on:
                self._evaluations.add(key)
                self._scalars(row.step, status.wall_s, {f"evaluation/{row.name}_{row.mode}": row.mean})

    def events(self, events: Sequence[Event]) -> None:
        del events

    def steps(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            values = {
                "reward/mean": row.reward_mean,
                "response/tokens_mean": row.response_tokens / max(1, row.num_samples),
                "staleness/inherent_mean": histogram_mean(row.inherent),
                "staleness/consumed_mean": histogram_mean(row.consumed),
            }
            values |= {f"train/{name}": value for name, value in sorted(row.stats.items())}
            self._scalars(row.step, row.wall_s, values)
        if self._writer is not None:
            self._writer.flush()

    def ended(self, result: Result, run: RunFolder) -> None:
        del result, run
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalars(self, step: int, wall_s: float, values: dict[str, float]) -> None:
        if self._writer is None:
            return
        scalars = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._writer.add_event(self._record(wall_time=wall_s, step=step, summary=self._summary(value=scalars)))
