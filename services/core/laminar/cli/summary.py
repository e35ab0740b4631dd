"""The end of a run in a few numbers: for the terminal, for `laminar run` on a finished folder, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laminar.cli.formats import count, duration, histogram_mean, mean, merged, with_interval
from laminar.cli.metering import surviving
from laminar.wire.messages import EvaluationRow, JobStatus, StepRow

if TYPE_CHECKING:
    from rich.table import Table

    from laminar.shell.audit import AuditReport
    from laminar.wire.spec import LaminarJob

REWARD_STEPS = 5
"""Steps at each end whose mean reward is compared: one step is too noisy."""


@dataclass(frozen=True, slots=True)
class Summary:
    """See the module. Rewards are means of the first and last REWARD_STEPS steps."""

    job: str
    committed_step: int
    steps: int
    wall_s: float
    """From the first lease to the last commit."""
    num_samples: int
    response_tokens: int
    reward_first: float | None
    reward_last: float | None
    inherent_mean: float
    inherent_max: int
    consumed_mean: float
    consumed_max: int
    restarted_samples: int
    moved_samples: int
    discarded: dict[str, int]
    evaluations: list[EvaluationRow]

    @property
    def tokens_per_s(self) -> float:
        return self.response_tokens / self.wall_s if self.wall_s > 0 else 0.0


def summarise(
    job: LaminarJob, steps: Sequence[StepRow], evaluations: Sequence[EvaluationRow], audit: AuditReport,
    first_lease_wall_s: float,
) -> Summary:  # fmt: skip
    """From what the run folder holds."""
    return _summary(
        job.metadata.name, audit.committed_step, job.spec.steps, surviving(steps), first_lease_wall_s,
        audit.restarted_samples, audit.moved_samples, audit.discarded, evaluations,
    )  # fmt: skip


def summarise_status(status: JobStatus, steps: Sequence[StepRow]) -> Summary:
    """From what a live pool says."""
    counts = status.counts
    return _summary(
        status.job, status.committed_step, status.steps, surviving(steps), status.first_lease_wall_s or 0.0,
        counts.restarted_samples, counts.moved_samples, counts.discarded, status.evaluations,
    )  # fmt: skip


def _summary(
    name: str, committed_step: int, num_steps: int, rows: list[StepRow], start_wall_s: float, restarted: int,
    moved: int, discarded: dict[str, int], evaluations: Sequence[EvaluationRow],
) -> Summary:  # fmt: skip
    inherent = merged([row.inherent for row in rows])
    consumed = merged([row.consumed for row in rows])
    start = start_wall_s or (rows[0].wall_s if rows else 0.0)
    return Summary(
        job=name, committed_step=committed_step, steps=num_steps, wall_s=rows[-1].wall_s - start if rows else 0.0,
        num_samples=sum(row.num_samples for row in rows), response_tokens=sum(row.response_tokens for row in rows),
        reward_first=mean([row.reward_mean for row in rows[:REWARD_STEPS]]),
        reward_last=mean([row.reward_mean for row in rows[-REWARD_STEPS:]]),
        inherent_mean=histogram_mean(inherent), inherent_max=max(inherent, default=0),
        consumed_mean=histogram_mean(consumed), consumed_max=max(consumed, default=0),
        restarted_samples=restarted, moved_samples=moved, discarded=dict(discarded), evaluations=list(evaluations),
    )  # fmt: skip


def summary_lines(total: Summary) -> list[tuple[str, str]]:
    """(name, value) of the run's own numbers, in reading order; the evaluations have their own table."""
    lines = [
        ("steps", f"{total.committed_step} of {total.steps}"),
        ("time", f"{duration(total.wall_s)} from the first lease to the last step"),
        ("tokens", f"{count(total.response_tokens)} in {count(total.num_samples)} trajectories, "
                   f"{count(total.tokens_per_s)} a second"),
    ]  # fmt: skip
    if total.reward_first is not None and total.reward_last is not None:
        gain = total.reward_last - total.reward_first
        lines.append(("reward", f"{total.reward_first:.3f} → {total.reward_last:.3f} ({gain:+.3f}; first and last "
                                f"{REWARD_STEPS} steps)"))  # fmt: skip
    lines += [
        ("staleness", f"inherent {total.inherent_mean:.2f}, at most {total.inherent_max}; consumed "
                      f"{total.consumed_mean:.2f}, at most {total.consumed_max}"),
        ("moved, restarted", f"{total.moved_samples} and {total.restarted_samples} trajectories"),
        ("discarded", ", ".join(f"{n} {reason}" for reason, n in sorted(total.discarded.items()) if n) or "none"),
    ]  # fmt: skip
    return lines


def series_of(rows: Sequence[EvaluationRow]) -> list[tuple[str, str]]:
    """Each (set, decoding) once, sampled before greedy."""
    return sorted({(row.name, row.mode) for row in rows}, key=lambda pair: (pair[0], pair[1] != "sampled"))


def evaluation_lines(rows: Sequence[EvaluationRow]) -> list[tuple[str, str, str, str, str]]:
    """(set, decoding, first, last, change), intervals at 95 %."""
    found = {(row.name, row.mode, row.point): row for row in rows}
    lines: list[tuple[str, str, str, str, str]] = []
    for name, mode in series_of(rows):
        first, last = found.get((name, mode, "first")), found.get((name, mode, "last"))
        change = f"{last.mean - first.mean:+.3f}" if first and last else "-"
        lines.append((name, mode, _score(first), _score(last), change))
    return lines


def _score(row: EvaluationRow | None) -> str:
    return with_interval(row.mean, row.stderr) if row else "-"


def summary_tables(total: Summary) -> list[Table]:
    """The short tables at the end of `laminar run`."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    numbers = Table.grid(padding=(0, 2))
    numbers.add_column(style="dim", no_wrap=True)
    numbers.add_column(overflow="fold")
    for name, value in summary_lines(total):
        numbers.add_row(name, Text(value))
    if not total.evaluations:
        return [numbers]
    scores = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("evaluation", "decoding", "first (95 %)", "last (95 %)", "change"):
        scores.add_column(title, justify="left" if title in ("evaluation", "decoding") else "right", no_wrap=True)
    for line in evaluation_lines(total.evaluations):
        scores.add_row(*line)
    return [numbers, scores]
