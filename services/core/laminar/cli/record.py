"""The lasting record of a run: RUN/metrics.jsonl, and what the view is told, from the pool's own books."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

from laminar.cli.formats import mean
from laminar.cli.run_folder import Result, RunFolder, durable_write
from laminar.cli.summary import REWARD_STEPS
from laminar.cli.view import View
from laminar.shell.calls import Unreachable
from laminar.shell.client import PoolClient
from laminar.wire.messages import Events, JobStatus, StepRow, Steps

REFRESH_EVERY_S = 1.0
CALL_S = 3.0
FINAL_S = 5.0
FINAL_AWAY_S = 1.0
"""For a pool that was away already."""
UNWRITABLE = "RunFolderUnwritable"
MAX_EVENTS = 500


class StepLog:
    """RUN/metrics.jsonl: one line a step, in order, of the surviving lineage only."""

    def __init__(self, run: RunFolder) -> None:
        self._path = run.metrics_file
        self.rows: dict[int, StepRow] = {}

    def extend(self, rows: Sequence[StepRow]) -> None:
        """Rows above all that are there."""
        with self._path.open("a") as file:
            for row in rows:
                self.rows[row.step] = row
                file.write(row.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())

    def replace(self, rows: Sequence[StepRow]) -> None:
        """All rows there are: after a rollback steps may have gone or changed."""
        self.rows = {row.step: row for row in sorted(rows, key=lambda row: (row.step, row.attempt))}
        if self.rows:
            durable_write(self._path, "\n".join(row.model_dump_json() for row in self.rows.values()))
        else:
            self._path.write_bytes(b"")  # not even an empty line


class Recorder:
    """Asks the pool about once a second, tells the view, keeps metrics.jsonl."""

    def __init__(self, client: PoolClient, run: RunFolder, view: View) -> None:
        self._client = client
        self._view = view
        self._log = StepLog(run)
        self._looking = asyncio.Lock()
        self._attempt: int | None = None
        self._last_seq = 0
        self._started_wall_s = time.time()
        self._finished = False
        self._conditions: dict[str, str] = {}
        self.status: JobStatus | None = None
        """The newest one, however old."""

    async def run(self) -> None:
        """Until `finish`, or cancelled. A pool that is away is asked again."""
        while not self._finished:
            try:
                await self.refresh(CALL_S)
            except Unreachable:
                pass  # noqa: S110  the driver sees the pool's absence itself; here there is only nothing to show
            await asyncio.sleep(REFRESH_EVERY_S)

    async def finish(self, *, pool_answers: bool) -> bool:
        """The last look, before the pool leaves. False: it did not answer; may be called again."""
        self._finished = True
        self._attempt = None
        try:
            await self.refresh(FINAL_S if pool_answers else FINAL_AWAY_S)
        except Unreachable:
            return False
        return True

    async def refresh(self, deadline_s: float) -> None:
        """One look at a time, so that a slow one never puts older books over newer ones. Raises Unreachable."""
        async with self._looking:
            await self._look(deadline_s)

    async def _look(self, deadline_s: float) -> None:
        status = await self._client.get_json("/v1/status", JobStatus, CALL_S, deadline_s=deadline_s)
        # The last step seen may have been rolled back and trained anew: its attempt tells.
        whole = status.attempt != self._attempt or status.committed_step < max(self._log.rows, default=0)
        after = -1 if whole else max(self._log.rows, default=-1)
        rows = await self._steps(after, deadline_s)
        known = self._log.rows
        news = [row for row in rows if known.get(row.step) != row]
        self._keep(rows, whole=whole, attempt=status.attempt)
        await self._events(deadline_s)
        self.status = status
        if news:
            self._view.steps(news)
        self._view.status(status)

    async def _steps(self, after: int, deadline_s: float) -> list[StepRow]:
        """All rows above `after`: the pool answers with a limited number a call."""
        found: list[StepRow] = []
        while True:
            params = {"after": after}
            page = (await self._client.get_json("/v1/steps", Steps, CALL_S, deadline_s=deadline_s, params=params)).root
            if not page or page[-1].step <= after:
                return found
            found += page
            after = page[-1].step

    def _keep(self, rows: Sequence[StepRow], *, whole: bool, attempt: int) -> None:
        """A full disk stops the record, not the training; the next look writes all of it."""
        try:
            if whole:
                self._log.replace(rows)
            elif rows:
                self._log.extend(rows)
        except OSError as error:
            self._attempt = None
            self._conditions[UNWRITABLE] = f"{error.filename or 'metrics.jsonl'}: {error.strerror}"
        else:
            self._attempt = attempt
            self._conditions.pop(UNWRITABLE, None)

    async def _events(self, deadline_s: float) -> None:
        params = {"after": self._last_seq, "limit": MAX_EVENTS}
        events = (await self._client.get_json("/v1/events", Events, CALL_S, deadline_s=deadline_s, params=params)).root
        if events:
            self._last_seq = events[-1].seq
            # What earlier drivers of this run have told is in the report, and old news here.
            self._view.events([event for event in events if event.wall_s >= self._started_wall_s])

    def result(self, phase: str, reason: str, num_steps: int, wall_s: float, conditions: dict[str, str]) -> Result:
        """How the run ended, from the last look."""
        rewards = [row.reward_mean for _, row in sorted(self._log.rows.items())]
        status = self.status
        return Result(
            phase=phase,
            reason=reason,
            steps=num_steps,
            committed_step=0 if status is None else status.committed_step,
            wall_s=wall_s,
            reward_first=mean(rewards[:REWARD_STEPS]),
            reward_last=mean(rewards[-REWARD_STEPS:]),
            evaluations=[] if status is None else status.evaluations,
            conditions=conditions | self._conditions | ({} if status is None else status.conditions),
            skipped_prompts={} if status is None else status.skipped_prompts,
        )
