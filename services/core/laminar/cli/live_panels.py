"""What stands on the live screen: pure functions from a `Screen` to rich renderables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from laminar.cli.formats import count, duration, evaluating, histogram_bars, histogram_mean, sparkline, with_interval
from laminar.cli.metering import seconds_per_step
from laminar.cli.summary import REWARD_STEPS, series_of
from laminar.wire.messages import (
    EngineLoad,
    EvaluationProgress,
    EvaluationRow,
    Event,
    JobStatus,
    MemberView,
    PoolPhase,
    Role,
    StepRow,
)
from laminar.wire.spec import LaminarJob

MAX_WIDTH = 110
"""Longer lines are harder to read, however wide the terminal is."""
MAX_REPLICAS = 12
"""Rows of a table before the rest is counted in one line: the screen must fit a terminal."""
_PHASES = {
    PoolPhase.STARTING: "starting",
    PoolPhase.EVALUATING_FIRST: "evaluating the first version",
    PoolPhase.TRAINING: "training",
    PoolPhase.EVALUATING_LAST: "evaluating the last version",
    PoolPhase.COMPLETE: "complete",
    PoolPhase.STOPPED: "stopped",
    PoolPhase.FAILED: "failed",
}
_STATES = {"running": "green", "idle": "cyan", "loading": "yellow", "starting": "yellow", "stale": "red"}


@dataclass(frozen=True, slots=True)
class Screen:
    """Everything that is shown. `steps`: surviving rows in order."""

    job: LaminarJob
    run_folder: Path
    status: JobStatus | None
    steps: Sequence[StepRow]
    events: Sequence[Event]
    note: str
    elapsed_s: float
    tokens_per_s: float | None


def screen(shown: Screen, width: int) -> RenderableType:
    """The whole screen for a terminal of `width` columns."""
    status = shown.status
    inner = min(width, MAX_WIDTH) - 4
    phase = "starting the processes" if status is None else _PHASES[status.phase]
    parts: list[RenderableType] = [_steps(shown, inner)]
    if status is not None and status.evaluating is not None:
        parts.append(_evaluating(status.evaluating, inner))
    if status is not None:
        parts += [_facts(shown, status, inner), Text(), _replicas(status)]
        parts += [part for part in (_evaluations(status), _conditions(status)) if part is not None]
    if shown.events:
        parts += [Text(), event_lines(shown.events)]
    if shown.note:
        parts.append(Text(shown.note, style="dim", overflow="ellipsis", no_wrap=True))
    title = Text.assemble((shown.job.metadata.name, "bold"), "  ", (phase, "cyan"))
    subtitle = Text(f"{duration(shown.elapsed_s)}  {shown.run_folder}", style="dim")
    return Panel(
        Group(*parts), title=title, title_align="left", subtitle=subtitle, subtitle_align="right",
        width=min(width, MAX_WIDTH), border_style="dim", padding=(0, 1),
    )  # fmt: skip


def bar(share: float, width: int, style: str = "cyan") -> Text:
    """A bar with eighths of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
    return Text.assemble((filled, style), ("░" * (width - len(filled)), "bright_black"))


def _steps(shown: Screen, width: int) -> RenderableType:
    total = shown.job.spec.steps
    done = 0 if shown.status is None else shown.status.committed_step
    pace = seconds_per_step(shown.steps)
    left = f"ETA {duration(pace * (total - done))}" if pace is not None and done < total else ""
    speed = f"{pace:.2f} s a step" if pace is not None else ""
    words = f" {done}/{total}  {speed}  {left}".rstrip()
    return Text.assemble(("step ", "dim"), bar(done / total, max(10, width - 5 - len(words))), (words, "bold"))


def _evaluating(progress: EvaluationProgress, width: int) -> RenderableType:
    """No step is made meanwhile: this is what moves."""
    name = evaluating(progress)
    share = progress.num_done / max(1, progress.num_samples)
    return Text.assemble((f"{name} ", "dim"), bar(share, max(10, min(40, width - len(name) - 1)), "magenta"))


def _facts(shown: Screen, status: JobStatus, width: int) -> Table:
    """Reward, speed, staleness, weights: one line each."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_row("reward", _reward(shown, width))
    counts = status.counts
    limit = shown.job.spec.schedule.max_ahead_steps * shown.job.spec.algorithm.prompts_per_step
    speed = "-" if shown.tokens_per_s is None else count(shown.tokens_per_s)
    table.add_row("tokens/s", Text.assemble(
        (speed, "bold"), f"   groups in flight {counts.started_unconsumed_groups} of {limit}"
        f"   trajectories open {count(counts.open)}, used {count(counts.consumed)}",
        f", discarded {sum(counts.discarded.values())}" if counts.discarded else "",
    ))  # fmt: skip
    table.add_row("staleness", Text.assemble(*_staleness("inherent", status.inherent.counts), "   ",
                                             *_staleness("consumed", status.consumed.counts)))  # fmt: skip
    newest = "none yet" if status.newest is None else f"version {status.newest.version} (step {status.newest.step})"
    chain = " → ".join(status.chain) or "no members"
    table.add_row("weights", Text.assemble(
        (newest, "bold"), f"   attempt {status.attempt}   chain epoch {status.epoch}: ", (chain, "magenta")
    ))  # fmt: skip
    return table


def _reward(shown: Screen, width: int) -> Text:
    rewards = [row.reward_mean for row in shown.steps]
    if not rewards:
        return Text("after the first step", style="dim")
    first = sum(rewards[:REWARD_STEPS]) / len(rewards[:REWARD_STEPS])
    words = f"   first {len(rewards[:REWARD_STEPS])}: {first:.3f}"
    trend = sparkline(rewards, max(8, min(60, width - 22 - len(words))))
    return Text.assemble((f"{rewards[-1]:.3f}", "bold green"), "  ", (trend, "green"), (words, "dim"))


def _staleness(name: str, counts: dict[int, int]) -> list[str | tuple[str, str]]:
    if not counts:
        return [f"{name} ", ("-", "dim")]
    return [f"{name} ", (f"{histogram_mean(counts):.2f}", "bold"), "  ", (histogram_bars(counts, 5), "yellow")]


def _replicas(status: JobStatus) -> Table:
    """Rollouts with their KV use; relays and trainer in one line below."""
    table = Table.grid(padding=(0, 2))
    for _ in range(5):
        table.add_column(no_wrap=True)
    rollouts = sorted((m for m in status.members if m.role is Role.ROLLOUT), key=lambda member: member.index)
    for member in rollouts[:MAX_REPLICAS]:
        load = status.loads.get(member.slot)
        share = load.kv_used_tokens / load.kv_capacity_tokens if load and load.kv_capacity_tokens else 0.0
        table.add_row(
            Text(member.slot, style="bold"), _state(member),
            Text("-" if member.version is None else f"v{member.version}"),
            Text.assemble("KV ", bar(share, 16, "blue"), f" {share:4.0%}"),
            Text(_queue(load)),
        )  # fmt: skip
    if len(rollouts) > MAX_REPLICAS:
        table.add_row(Text(f"and {len(rollouts) - MAX_REPLICAS} more", style="dim"))
    others = Text()
    for member in sorted(status.members, key=lambda member: member.slot):
        if member.role in (Role.RELAY, Role.TRAINER):
            held = f" v{member.version}" if member.version is not None else ""
            others.append_text(Text.assemble((member.slot, "bold"), " ", _state(member), held, "   "))
    if others:
        outer = Table.grid()
        outer.add_row(table)
        outer.add_row(others)
        return outer
    return table


def _queue(load: EngineLoad | None) -> str:
    if load is None:
        return ""
    return f"{load.running} running" + (f", {load.waiting} waiting" if load.waiting else "")


def _state(member: MemberView) -> Text:
    if member.fenced:
        return Text("fenced", style="red")
    if member.suspect:
        return Text(f"suspect {member.silent_s:.0f} s", style="bold red")
    if member.stalled:
        return Text("stalled", style="bold red")
    life = f" (life {member.life})" if member.life > 1 else ""
    return Text(member.state.value + life, style=_STATES.get(member.state.value, "white"))


def _evaluations(status: JobStatus) -> Table | None:
    """Results of those that ended."""
    if not status.evaluations:
        return None
    found = {(row.name, row.mode, row.point): row for row in status.evaluations}
    table = Table.grid(padding=(0, 2))
    for name, mode in series_of(status.evaluations):
        cells = [_evaluation(found.get((name, mode, point)), point) for point in ("first", "last")]
        table.add_row(Text(f"{name}, {mode}", style="dim"), *cells)
    return table


def _evaluation(row: EvaluationRow | None, point: str) -> Text:
    if row is None:
        return Text()
    return Text.assemble(f"{point} ", (with_interval(row.mean, row.stderr), "bold"))


def _conditions(status: JobStatus) -> RenderableType | None:
    lines = [f"{name}: {text}" for name, text in status.conditions.items() if text]
    if status.skipped_prompts:
        skipped = ", ".join(f"{number} {reason}" for reason, number in sorted(status.skipped_prompts.items()))
        lines.append(f"prompts left out: {skipped}")
    if status.reason:
        lines.append(status.reason)
    return Text("\n".join(lines), style="yellow") if lines else None


def event_lines(events: Sequence[Event]) -> Text:
    """One line each, with the time of day."""
    lines = Text(overflow="ellipsis", no_wrap=True)
    for place, event in enumerate(events):
        clock = time.strftime("%H:%M:%S", time.localtime(event.wall_s))
        lines.append_text(Text.assemble("\n" if place else "", (clock, "dim"), "  ", _one_line(event.text)))
    return lines


def _one_line(text: str) -> str:
    return " ".join(text.split())
