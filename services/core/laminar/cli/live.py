"""The live view of `laminar run` on a terminal: one screen that is drawn again as the pool reports.

No thread and no timer: the driver's calls draw, at most REFRESHES_PER_S times a second and never so often that
drawing takes more than MAX_CPU_SHARE of the time.
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.live import Live

from laminar.cli.formats import duration
from laminar.cli.live_panels import Screen, screen
from laminar.cli.metering import TokenMeter
from laminar.cli.run_folder import Result, RunFolder
from laminar.cli.summary import Summary, summarise_status, summary_tables
from laminar.cli.view import left_out
from laminar.wire.messages import Event, JobStatus, StepRow
from laminar.wire.spec import LaminarJob

REFRESHES_PER_S = 4
MAX_CPU_SHARE = 0.02
"""The rest of the core belongs to the training."""
SHOWN_EVENTS = 6


class LiveView:
    """A View (`laminar.cli.view`). `clock` is monotonic. Before `started` notes are printed as lines."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._run: RunFolder | None = None
        self._started_s = clock()
        self._next_draw_s = float("-inf")
        self._job: LaminarJob | None = None
        self._status: JobStatus | None = None
        self._steps: dict[int, StepRow] = {}
        self._events: deque[Event] = deque(maxlen=SHOWN_EVENTS)
        self._note = ""
        self._meter = TokenMeter()

    def started(self, job: LaminarJob, run: RunFolder) -> None:
        self._job, self._run = job, run
        self._started_s = self._clock()
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()
        # However the process ends in Python, the terminal gets its cursor back.
        atexit.register(self._close)
        self._draw()

    def note(self, text: str) -> None:
        if self._live is None:
            self._console.print(text, style="dim", markup=False, highlight=False)
        else:
            self._note = text
            self._draw()

    def status(self, status: JobStatus) -> None:
        self._status = status
        self._meter.add(status.loads, self._clock())
        if status.committed_step < max(self._steps, default=0):
            self._steps = {step: row for step, row in self._steps.items() if step <= status.committed_step}
        self._draw()

    def events(self, events: Sequence[Event]) -> None:
        self._events.extend(events)
        self._draw()

    def steps(self, rows: Sequence[StepRow]) -> None:
        self._steps.update((row.step, row) for row in rows)
        self._draw()

    def ended(self, result: Result, run: RunFolder) -> None:
        if self._live is not None:
            self._next_draw_s = float("-inf")
            self._draw()
            self._close()
            atexit.unregister(self._close)
        _print_ending(self._console, result, run, self._summary(run))

    def _close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _summary(self, run: RunFolder) -> Summary | None:
        if self._status is not None:
            return summarise_status(self._status, self._rows())
        # A run that had finished before, or whose pool never answered.
        from laminar.cli.status import summary_of_run

        return summary_of_run(run)

    def _rows(self) -> list[StepRow]:
        return [self._steps[step] for step in sorted(self._steps)]

    def _draw(self) -> None:
        now_s = self._clock()
        if self._live is None or self._job is None or self._run is None or now_s < self._next_draw_s:
            return
        shown = Screen(
            job=self._job, run_folder=self._run.path, status=self._status, steps=self._rows(),
            events=list(self._events), note=self._note, elapsed_s=now_s - self._started_s,
            tokens_per_s=self._meter.tokens_per_s,
        )  # fmt: skip
        self._live.update(screen(shown, self._console.width), refresh=True)
        spent_s = self._clock() - now_s
        self._next_draw_s = now_s + max(1 / REFRESHES_PER_S, spent_s / MAX_CPU_SHARE)


def _print_ending(console: Console, result: Result, run: RunFolder, total: Summary | None) -> None:
    """How it ended, the short tables, and where things lie."""
    style = {"complete": "bold green", "failed": "bold red"}.get(result.phase, "bold yellow")
    console.print(f"{result.phase} after {duration(result.wall_s)}", style=style, highlight=False)
    if result.reason and result.phase != "complete":
        console.print(result.reason, markup=False, highlight=False)
    if total is not None:
        for table in summary_tables(total):
            console.print(table)
    if result.skipped_prompts:
        console.print(f"prompts left out: {left_out(result.skipped_prompts)}", markup=False, highlight=False)
    for name, text in result.conditions.items():
        if text:
            console.print(f"{name}: {text}", style="yellow", markup=False, highlight=False)
    _print_where(console, result, run)


def _print_where(console: Console, result: Result, run: RunFolder) -> None:
    """Where things lie. Paths are never wrapped or cut: people copy them."""
    places = [("report", run.path / "report.html"), ("model", run.model)]
    if result.phase == "failed":
        places.append(("logs", run.path / "logs"))
    for name, path in places:
        if path.exists():
            console.print(f"{name}  {path}", markup=False, highlight=False, soft_wrap=True)
    if result.phase == "stopped":
        console.print("Run the same command again to go on.", highlight=False)
