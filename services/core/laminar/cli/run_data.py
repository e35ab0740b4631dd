"""What a run left behind, read once for the report: bounded in size, whatever the length of the run.

Everything comes from the run folder, read-only: the pool's ledger and the driver's JSON files. A run that is still
going is read as it stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from laminar.cli.errors import BadInput
from laminar.cli.metering import surviving
from laminar.cli.recorders import read_driver_events
from laminar.cli.run_folder import JobRecord, Result, RunFolder, State
from laminar.cli.texts import Decoder
from laminar.shell.audit import AuditReport, read_audit
from laminar.shell.ledger_file import (
    LedgerFileError,
    LoadPoint,
    StoredSample,
    StoredVersion,
    open_ledger,
    read_evaluations,
    read_events,
    read_loads,
    read_meta,
    read_samples,
    read_steps,
    read_versions,
)
from laminar.wire.messages import EvaluationRow, Event, StepRow
from laminar.wire.spec import LaminarJob

MAX_TRAJECTORIES = 12_000
"""Bars of the timeline: about 350 kB in the file, more than a screen has pixels for."""
MAX_EVENTS = 400
MAX_LOAD_POINTS = 600
"""Points a replica of a chart over time."""
MAX_SHOWN_GROUPS = 4
"""Prompts of a step whose responses are shown in full."""

T = TypeVar("T")


class Thinning(Generic[T]):
    """Keeps at most `most` items of a stream, evenly spread, without knowing its length: when full, every second one
    goes and from then on half as many are taken."""

    def __init__(self, most: int) -> None:
        assert most >= 2
        self.items: list[T] = []
        self.num_seen = 0
        self._most = most
        self._stride = 1

    def add(self, item: T) -> None:
        if self.num_seen % self._stride == 0:
            if len(self.items) == self._most:
                self.items = self.items[::2]
                self._stride *= 2
            if self.num_seen % self._stride == 0:
                self.items.append(item)
        self.num_seen += 1


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One bar of the timeline. Times in seconds since the first lease."""

    slot: str
    start_s: float
    end_s: float
    version: int
    length: int
    reward: float | None
    state: str


@dataclass(frozen=True, slots=True)
class ShownSample:
    """A response as people read it."""

    id: str
    response: str | None
    """None: its tokens are not kept any more."""
    reward: float
    parts: dict[str, float]
    version: int | None
    inherent: int | None
    length: int
    finish_reason: str
    slot: str | None


@dataclass(frozen=True, slots=True)
class ShownGroup:
    prompt: str
    answer: str
    samples: list[ShownSample]

    @property
    def reward_mean(self) -> float:
        return sum(sample.reward for sample in self.samples) / len(self.samples)


@dataclass(frozen=True, slots=True)
class ShownStep:
    step: int
    groups: list[ShownGroup]
    num_groups: int


@dataclass(slots=True)
class Lengths:
    """Response lengths of one part of the run."""

    label: str
    counts: Counter[int] = field(default_factory=Counter[int])
    num_cut: int = 0
    """Responses that ended at the limit."""


@dataclass(frozen=True, slots=True)
class RunData:
    """See the module."""

    folder: Path
    record: JobRecord
    job: LaminarJob
    state: State
    result: Result | None
    steps: list[StepRow]
    evaluations: list[EvaluationRow]
    events: list[Event]
    num_events: int
    loads: list[LoadPoint]
    versions: list[StoredVersion]
    trajectories: list[Trajectory]
    num_trajectories: int
    lengths: list[Lengths]
    shown: list[ShownStep]
    audit: AuditReport
    origin_wall_s: float
    """Wall time of the first lease: zero of all charts over time."""


def open_run(path: Path) -> tuple[RunFolder, JobRecord, LaminarJob]:
    """The folder and its job. Raises BadInput if no run is there."""
    folder = RunFolder(path)
    record = folder.job() if path.is_dir() else None
    if record is None:
        near = sorted(child.name for child in path.iterdir() if (child / "job.json").is_file()) if path.is_dir() else []
        hint = f" Did you mean {path / near[0]}?" if near else " `laminar run` makes one, ./runs/NAME by default."
        raise BadInput(f"{path} is not a run folder: it has no job.json.{hint}")
    return folder, record, folder.spec() or record.requested


def load_run(path: Path) -> RunData:
    """Reads everything that the report shows. Raises BadInput if the folder holds no run or no ledger yet."""
    folder, record, job = open_run(path)
    decoder = Decoder.of_job(job)
    try:
        with open_ledger(folder.store) as ledger:
            uid = read_meta(ledger).get("job_uid")
            if uid is not None and uid != record.uid:
                raise BadInput(f"The ledger in {folder.store} belongs to job {uid}, not to {record.uid} of {path}.")
            steps = surviving(read_steps(ledger))
            events = sorted([*read_events(ledger), *read_driver_events(folder)], key=lambda event: event.wall_s)
            last = steps[-1].step if steps else 1
            origin, bars, lengths = _walk(read_samples(ledger), last)
            shown = [
                _shown(step, read_samples(ledger, step=step, with_tokens=True), decoder) for step in sorted({1, last})
            ]
            loads = list(_thin_loads(read_loads(ledger)))
            versions = read_versions(ledger)
            evaluations = read_evaluations(ledger)
        audit = read_audit(folder.store)
    except LedgerFileError as error:
        raise BadInput(f"{path} has no ledger that can be read: {error}.") from error
    return RunData(
        folder=path, record=record, job=job, state=folder.state(), result=folder.result(), steps=steps,
        evaluations=evaluations, events=events[-MAX_EVENTS:], num_events=len(events), loads=loads, versions=versions,
        trajectories=bars.items, num_trajectories=bars.num_seen, lengths=lengths,
        shown=[step for step in shown if step.groups], audit=audit, origin_wall_s=origin,
    )  # fmt: skip


def _walk(samples: Iterable[StoredSample], last_step: int) -> tuple[float, Thinning[Trajectory], list[Lengths]]:
    """One pass over all trajectories: the time origin, the bars of the timeline, and lengths at both ends."""
    bars: Thinning[Trajectory] = Thinning(MAX_TRAJECTORIES)
    share = max(1, last_step // 10)
    first = Lengths("step 1" if share == 1 else f"steps 1 to {share}")
    final = Lengths(f"step {last_step}" if share == 1 else f"steps {last_step - share + 1} to {last_step}")
    origin = float("inf")
    for sample in samples:
        if sample.leased_wall_s > 0:
            origin = min(origin, sample.leased_wall_s)
        if sample.slot is not None and sample.version is not None and sample.finished_wall_s > 0:
            graded = sample.state in ("graded", "batched", "consumed")
            bars.add(
                Trajectory(
                    sample.slot, sample.leased_wall_s, sample.finished_wall_s, sample.version, sample.length,
                    sample.reward if graded else None, sample.state,
                )
            )  # fmt: skip
        if sample.step is None or sample.state not in ("batched", "consumed"):
            continue
        for part, inside in ((first, sample.step <= share), (final, last_step - share < sample.step <= last_step)):
            if inside:
                part.counts[sample.length] += 1
                part.num_cut += sample.finish_reason == "length"
    origin = 0.0 if origin == float("inf") else origin
    bars.items = [
        Trajectory(b.slot, b.start_s - origin, b.end_s - origin, b.version, b.length, b.reward, b.state)
        for b in bars.items
    ]
    parts = [first] if last_step <= share else [first, final]
    return origin, bars, [part for part in parts if part.counts]


def shown_groups(samples: Iterable[StoredSample], decoder: Decoder) -> Iterator[ShownGroup]:
    """Samples in ledger order, put together by prompt."""
    group: list[StoredSample] = []
    for sample in samples:
        if group and sample.id.rpartition("/")[0] != group[0].id.rpartition("/")[0]:
            yield _group(group, decoder)
            group = []
        group.append(sample)
    if group:
        yield _group(group, decoder)


def _group(samples: list[StoredSample], decoder: Decoder) -> ShownGroup:
    return ShownGroup(
        samples[0].prompt_text,
        samples[0].answer,
        [
            ShownSample(
                s.id, None if s.tokens is None else decoder.text(s.tokens), s.reward, s.parts, s.version, s.inherent,
                s.length, s.finish_reason, s.slot,
            )
            for s in samples
        ],
    )  # fmt: skip


def _shown(step: int, samples: Iterable[StoredSample], decoder: Decoder) -> ShownStep:
    """The groups with the most different rewards first: those are what the step learned from."""
    groups = list(shown_groups(samples, decoder))
    spread = sorted(groups, key=lambda group: -_variance([sample.reward for sample in group.samples]))
    return ShownStep(step, spread[:MAX_SHOWN_GROUPS], len(groups))


def _variance(values: list[float]) -> float:
    middle = sum(values) / len(values)
    return sum((value - middle) ** 2 for value in values) / len(values)


def _thin_loads(points: list[LoadPoint]) -> Iterator[LoadPoint]:
    by_slot: dict[str, list[LoadPoint]] = {}
    for point in points:
        by_slot.setdefault(point.slot, []).append(point)
    for slot in sorted(by_slot):
        kept: Thinning[LoadPoint] = Thinning(MAX_LOAD_POINTS)
        for point in by_slot[slot]:
            kept.add(point)
        yield from kept.items
