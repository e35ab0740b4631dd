"""What people and programs see of a run. The driver calls a view; a view never waits and never raises.

started -> (note | status | events | steps)* -> ended
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Protocol, TextIO

from laminar.cli.formats import Z_95, evaluating
from laminar.cli.run_folder import Result, RunFolder
from laminar.wire.messages import Event, JobStatus, StepRow
from laminar.wire.spec import LaminarJob

PLAIN_STATUS_EVERY_S = 10.0
"""A log that nobody watches should stay short."""
PLAIN_STEPS_AT_ONCE = 10
"""More new rows than this at once are those of an earlier driver of the run."""


class View(Protocol):
    def started(self, job: LaminarJob, run: RunFolder) -> None:
        """The run's processes are about to start. `run.endpoint_file` names the pool's page."""
        ...

    def note(self, text: str) -> None:
        """A line for people, e.g. the progress of a recipe. Comes before `started` too."""
        ...

    def status(self, status: JobStatus) -> None:
        """About once a second."""
        ...

    def events(self, events: Sequence[Event]) -> None:
        """New ones, in order: the pool's, and the driver's own (seq 0)."""
        ...

    def steps(self, rows: Sequence[StepRow]) -> None:
        """New rows, or rows that a rollback has replaced (their step is not above the last one seen)."""
        ...

    def ended(self, result: Result, run: RunFolder) -> None:
        """The last call; all processes are gone."""
        ...


class QuietView:
    """Nothing but how it ended."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def started(self, job: LaminarJob, run: RunFolder) -> None:
        del job, run

    def note(self, text: str) -> None:
        del text

    def status(self, status: JobStatus) -> None:
        del status

    def events(self, events: Sequence[Event]) -> None:
        del events

    def steps(self, rows: Sequence[StepRow]) -> None:
        del rows

    def ended(self, result: Result, run: RunFolder) -> None:
        for line in ending(result, run):
            self._print(line)

    def _print(self, line: str) -> None:
        print(line, file=self._out, flush=True)


class PlainView(QuietView):
    """Lines without control characters, for logs and pipes."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._num_steps = 0
        self._last_status_s = float("-inf")
        self._phase = ""

    def started(self, job: LaminarJob, run: RunFolder) -> None:
        self._num_steps = job.spec.steps
        self._print(f"{job.metadata.name}: {job.spec.steps} steps, run folder {run.path}")

    def note(self, text: str) -> None:
        self._print(text)

    def status(self, status: JobStatus) -> None:
        now_s = time.monotonic()
        if status.phase == self._phase and now_s - self._last_status_s < PLAIN_STATUS_EVERY_S:
            return
        self._phase, self._last_status_s = status.phase, now_s
        if status.evaluating is not None:
            self._print(f"[{status.phase}] {evaluating(status.evaluating)}")
            return
        newest = "none" if status.newest is None else f"v{status.newest.version}"
        running = sum(load.running for load in status.loads.values())
        self._print(
            f"[{status.phase}] step {status.committed_step}/{status.steps}, newest version {newest}, "
            f"chain epoch {status.epoch}, {running} trajectories running"
        )

    def events(self, events: Sequence[Event]) -> None:
        for event in events:
            self._print(f"  {event.text}")

    def steps(self, rows: Sequence[StepRow]) -> None:
        if len(rows) > PLAIN_STEPS_AT_ONCE:
            self._print(f"steps {rows[0].step} to {rows[-2].step} were trained before")
            rows = rows[-1:]
        for row in rows:
            stale = ", ".join(f"{value}:{count}" for value, count in sorted(row.consumed.items()))
            self._print(
                f"step {row.step}/{self._num_steps}  reward {row.reward_mean:.3f}  {row.num_samples} samples  "
                f"{row.response_tokens} tokens  staleness {stale or '-'}"
            )


class JsonView:
    """One JSON object a line: `{"type": "started" | "note" | "status" | "event" | "step" | "ended", ...}`."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def started(self, job: LaminarJob, run: RunFolder) -> None:
        self._write("started", json.dumps({"job": job.metadata.name, "steps": job.spec.steps, "run": str(run.path)}))

    def note(self, text: str) -> None:
        self._write("note", json.dumps({"text": text}))

    def status(self, status: JobStatus) -> None:
        self._write("status", status.model_dump_json())

    def events(self, events: Sequence[Event]) -> None:
        for event in events:
            self._write("event", event.model_dump_json())

    def steps(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            self._write("step", row.model_dump_json())

    def ended(self, result: Result, run: RunFolder) -> None:
        del run
        self._write("ended", result.model_dump_json())

    def _write(self, kind: str, body: str) -> None:
        print('{"type":' + json.dumps(kind) + "," + body[1:], file=self._out, flush=True)


def left_out(skipped: dict[str, int]) -> str:
    """`2 missingAnswer, 3 tooLong`."""
    return ", ".join(f"{number} {reason}" for reason, number in sorted(skipped.items()))


def ending(result: Result, run: RunFolder) -> list[str]:
    """How a run ended, in a few lines."""
    lines = [f"{result.phase}: step {result.committed_step}/{result.steps} after {result.wall_s:.0f} s"]
    if result.reward_first is not None and result.reward_last is not None:
        lines.append(f"reward {result.reward_first:.3f} -> {result.reward_last:.3f} (first and last 5 steps)")
    for row in result.evaluations:
        lines.append(f"{row.name} ({row.mode}, {row.point} version): {row.mean:.3f} +- {Z_95 * row.stderr:.3f}")
    if result.skipped_prompts:
        lines.append(f"prompts left out: {left_out(result.skipped_prompts)}")
    lines.extend(f"{name}: {text}" for name, text in result.conditions.items() if text)
    if result.phase == "complete":
        lines.append(f"model: {run.model}")
    elif result.phase == "stopped":
        lines.append("Run the same command again to go on.")
    else:
        lines.append(f"{result.reason}\nLogs: {run.path / 'logs'}")
    return lines
