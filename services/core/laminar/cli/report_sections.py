"""The report's sections about the whole run: numbers, curves, staleness, lengths, KV, history. HTML text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape

import yaml

from laminar.cli.formats import count, duration, histogram_mean, interval95, merged, thin, with_interval
from laminar.cli.report_charts import Frame, Series, area_strip, histogram_chart, legend, line_chart, padded
from laminar.cli.run_data import RunData
from laminar.cli.summary import Summary, series_of, summarise
from laminar.core.versions import VersionState
from laminar.wire.messages import EvaluationRow, StepRow

MAX_CURVE_POINTS = 400
"""More points than a chart has pixels only make the file larger."""
STRIP_HEIGHT = 104.0
SMOOTHING_STEPS = 5
"""The same window that the summary's first and last reward use."""
STATS = (
    ("loss", "loss"), ("grad_norm", "gradient norm"), ("clip_fraction", "share of clipped tokens"),
    ("entropy_estimate", "entropy estimate"), ("logprob_diff_mean", "log-prob difference, mean"),
    ("train_s", "seconds of training a step"),
)  # fmt: skip


def section(title: str, body: str, note: str = "") -> str:
    """One card of the page."""
    extra = f'<p class="note">{note}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{extra}{body}</section>"


def cards(data: RunData) -> str:
    """The numbers people look for first."""
    total = summarise(data.job, data.steps, data.evaluations, data.audit, data.origin_wall_s)
    cells = [
        ("steps", f"{total.committed_step} / {data.job.spec.steps}", f"{count(total.num_samples)} trajectories"),
        ("time from the first lease", duration(total.wall_s), _rate(total)),
        ("training reward", _first_last(total.reward_first, total.reward_last), "mean of the first and last 5 steps"),
        *_heldout_card(total.evaluations),
        ("staleness when used", f"{total.consumed_mean:.2f}", f"mean, {total.consumed_max} at most, in steps"),
        ("moved, restarted", f"{total.moved_samples}, {total.restarted_samples}", "trajectories"),
        ("weights", f"{len(data.versions)} versions", f"attempt {data.state.attempt}, chain epoch {data.state.epoch}"),
        ("audit", "holds" if data.audit.ok else "VIOLATED", data.audit.equation),
    ]
    body = "".join(
        f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b><em>{escape(note)}</em></div>'
        for name, value, note in cells
    )
    return f'<div class="cards">{body}</div>'


def _rate(total: Summary) -> str:
    return f"{count(total.response_tokens)} tokens, {count(total.tokens_per_s)} a second"


def _first_last(first: float | None, last: float | None) -> str:
    return "-" if first is None or last is None else f"{first:.3f} → {last:.3f}"


def _heldout_card(rows: Sequence[EvaluationRow]) -> list[tuple[str, str, str]]:
    sampled = {row.point: row for row in rows if (row.mode, row.name) == ("sampled", rows[0].name)}
    if not sampled:
        return []
    first, last = sampled.get("first"), sampled.get("last")
    value = " → ".join(f"{row.mean:.3f}" if row else "-" for row in (first, last))
    return [(f"{rows[0].name}, sampled", value, "first and last version")]


def reward_section(data: RunData) -> str:
    """Reward of every step, and its moving mean."""
    steps = data.steps
    if not steps:
        return section("Training reward", "<p>No step has been committed yet.</p>")
    means = [
        sum(row.reward_mean for row in steps[max(0, i - SMOOTHING_STEPS + 1) : i + 1]) / min(i + 1, SMOOTHING_STEPS)
        for i in range(len(steps))
    ]
    every = -(-len(steps) // MAX_CURVE_POINTS)
    rows, smooth = steps[::every], means[::every]
    curve = [(float(row.step), value) for row, value in zip(rows, smooth, strict=True)]
    dots = [(float(row.step), row.reward_mean) for row in rows]
    frame = Frame((float(steps[0].step), float(steps[-1].step)), padded([y for _, y in [*dots, *curve]]))
    tips = [
        f"step {row.step}: reward {row.reward_mean:.3f}, mean of 5 {value:.3f}\n{row.num_samples} trajectories, "
        f"{duration(row.wall_s - data.origin_wall_s)} after the first lease"
        for row, value in zip(rows, smooth, strict=True)
    ]
    # The line comes first: its points carry the tips.
    chart = line_chart(
        [Series("mean of 5 steps", curve, 1, fill=True), Series("step", dots, 1, dots=True)],
        frame, title="Training reward by step", x_label="training step", tips=tips,
    )  # fmt: skip
    return section("Training reward", chart, "Each dot is the mean reward of one step's trajectories; the line is the "
                   f"mean of {SMOOTHING_STEPS} steps.")  # fmt: skip


def evaluation_section(data: RunData) -> str:
    """First against last version, sampled and greedy."""
    rows = data.evaluations
    if not rows:
        if not data.job.spec.evaluations:
            return ""
        return section("Evaluation", "<p>No evaluation has ended yet.</p>")
    found = {(row.name, row.mode, row.point): row for row in rows}
    lines: list[str] = []
    for name, mode in series_of(rows):
        first, last = found.get((name, mode, "first")), found.get((name, mode, "last"))
        lines.append(
            f"<tr><td>{escape(name)}</td><td>{mode}</td>{_score(first)}{_score(last)}{_gain(first, last)}</tr>"
        )
    head = (
        '<tr><th>set</th><th>decoding</th><th class="n">first</th><th class="n">last</th><th class="n">change</th></tr>'
    )
    note = "Mean reward with its 95 % confidence interval; sampled at temperature 1, and greedy."
    return section("Evaluation", f'<div class="scroll"><table>{head}{"".join(lines)}</table></div>', note)


def _score(row: EvaluationRow | None) -> str:
    if row is None:
        return '<td class="n">-</td>'
    low, high = interval95(row.mean, row.stderr)
    tip = f"version {row.version}, step {row.step}: {row.num_graded} of {row.num_items} graded; {low:.3f} to {high:.3f}"
    return f'<td class="n" data-tip="{escape(tip)}">{with_interval(row.mean, row.stderr)}</td>'


def _gain(first: EvaluationRow | None, last: EvaluationRow | None) -> str:
    if first is None or last is None:
        return '<td class="n">-</td>'
    gain = last.mean - first.mean
    return f'<td class="n {"up" if gain >= 0 else "down"}">{gain:+.3f}</td>'


def staleness_section(data: RunData) -> str:
    """Inherent and consumed staleness of the trajectories that steps used."""
    inherent = merged([row.inherent for row in data.steps])
    consumed = merged([row.consumed for row in data.steps])
    charts = histogram_chart(
        [("inherent", inherent, 3), ("consumed", consumed, 2)],
        title="Histogram of staleness", x_label="training steps", width=520,
    )  # fmt: skip
    keys = [
        (f"inherent, mean {histogram_mean(inherent):.2f}, at most {max(inherent, default=0)}", 3),
        (f"consumed, mean {histogram_mean(consumed):.2f}, at most {max(consumed, default=0)}", 2),
    ]
    note = (
        "Steps between the version that generated a trajectory and the newest one when it finished (inherent), or the "
        "one that the step using it started from (consumed)."
    )
    return section("Staleness", legend(keys) + charts, note)


def length_section(data: RunData) -> str:
    """Lengths at both ends of the run, and the mean over steps."""
    colors = (5, 1)
    if not data.lengths:
        return section("Response lengths", "<p>No step has used a trajectory yet.</p>")
    groups = [(part.label, dict(part.counts), colors[i % 2]) for i, part in enumerate(data.lengths)]
    keys = [
        (f"{p.label}: mean {histogram_mean(p.counts):.1f}, {p.num_cut / p.counts.total():.1%} cut at the limit", c)
        for p, c in zip(data.lengths, colors, strict=False)
    ]
    chart = histogram_chart(groups, title="Histogram of response lengths", x_label="tokens")
    return section("Response lengths", legend(keys) + chart,
                   f"Tokens of a response; the limit is {data.job.spec.sampling.max_response_tokens}.")  # fmt: skip


def kv_section(data: RunData) -> str:
    """KV utilisation of each replica over time."""
    slots = sorted({point.slot for point in data.loads})
    if not slots:
        return section("KV cache in use", "<p>No replica has reported its load.</p>")
    end = max(point.wall_s for point in data.loads) - data.origin_wall_s
    peak = max(p.load.kv_used_tokens / max(1, p.load.kv_capacity_tokens) for p in data.loads)
    top = next(limit for limit in (0.05, 0.1, 0.2, 0.5, 1.0) if peak <= limit or limit == 1.0)
    frame = Frame((0.0, max(end, 1.0)), (0.0, top), height=STRIP_HEIGHT)
    parts: list[str] = []
    for slot in slots:
        points = [point for point in data.loads if point.slot == slot and point.load.kv_capacity_tokens > 0]
        shares = [p.load.kv_used_tokens / p.load.kv_capacity_tokens for p in points]
        times = [max(0.0, p.wall_s - data.origin_wall_s) for p in points]
        tips = [
            f"{slot} at {time:.1f} s: {share:.0%} of {p.load.kv_capacity_tokens} tokens\n{p.load.running} running, "
            f"{p.load.waiting} waiting, version {'none' if p.version is None else p.version}"
            for p, share, time in zip(points, shares, times, strict=True)
        ]
        average = sum(shares) / len(shares) if shares else 0.0
        curve = list(zip(times, shares, strict=True))
        strip = area_strip(f"KV utilisation of {slot}", curve, frame, color=3, tips=tips)
        parts.append(f"<h3>{escape(slot)}: mean {average:.0%}, peak {max(shares, default=0.0):.0%}</h3>{strip}")
    note = "Share of each engine's KV capacity in use; time in seconds since the first lease."
    return section("KV cache in use", "".join(parts), note)


def training_section(data: RunData) -> str:
    """What the trainer measured, as small curves."""
    charts: list[str] = []
    for key, label in STATS:
        rows = [row for row in data.steps if key in row.stats]
        if len(rows) < 2:
            continue
        every = -(-len(rows) // MAX_CURVE_POINTS)
        charts.append(_small_curve(label, rows[::every], lambda row, key=key: row.stats[key]))
    lengths = thin([row.response_tokens / max(1, row.num_samples) for row in data.steps], 2)
    if len(lengths) > 1:
        every = -(-len(data.steps) // MAX_CURVE_POINTS)
        charts.append(
            _small_curve(
                "tokens a response, mean", data.steps[::every],
                lambda row: row.response_tokens / max(1, row.num_samples),
            )
        )  # fmt: skip
    return section("Training", f'<div class="two">{"".join(charts)}</div>') if charts else ""


def _small_curve(label: str, rows: Sequence[StepRow], value: Callable[[StepRow], float]) -> str:
    points = [(float(row.step), value(row)) for row in rows]
    frame = Frame((points[0][0], points[-1][0]), padded([y for _, y in points]), 480.0, 170.0)
    tips = [f"step {x:g}: {y:.4g}" for x, y in points]
    chart = line_chart([Series(label, points, 4)], frame, title=label, x_label="training step", tips=tips)
    return f"<div><h3>{escape(label)}</h3>{chart}</div>"


def ledger_section(data: RunData) -> str:
    """The audit's equation with its numbers."""
    audit = data.audit
    rows = [("admitted", audit.admitted), ("consumed", audit.consumed)]
    rows += [(f"discarded: {reason}", number) for reason, number in sorted(audit.discarded.items())]
    rows += [("open", audit.open), ("restarted from the prompt", audit.restarted_samples)]
    rows += [("tokens generated again", audit.restarted_tokens), ("moved to another replica", audit.moved_samples)]
    rows += [(f"late messages refused: {kind}", number) for kind, number in sorted(audit.refused.items())]
    body = "".join(f'<tr><td>{escape(name)}</td><td class="n">{number:,}</td></tr>' for name, number in rows)
    violations = "".join(f'<p class="down">{escape(text)}</p>' for text in audit.violations)
    return section("Trajectories accounted for", f"{violations}<table>{body}</table>", escape(audit.equation))


def history_section(data: RunData) -> str:
    """Attempts of the trainer, the relay chain, lives of every process."""
    attempts: dict[int, list[int]] = {}
    for version in data.versions:
        attempts.setdefault(version.attempt, []).append(version.version)
    unseen = {version.version for version in data.versions if version.state != VersionState.VISIBLE}
    rows = [
        f"<tr><td>attempt {attempt}</td><td>versions {min(numbers)} to {max(numbers)}"
        f"{_unseen(len(unseen.intersection(numbers)))}</td></tr>"
        for attempt, numbers in sorted(attempts.items())
    ]
    chain = " → ".join(f"{member.slot} ({member.machine or 'no machine'})" for member in data.state.chain) or "-"
    rows.append(f"<tr><td>relay chain, epoch {data.state.epoch}</td><td>{escape(chain)}</td></tr>")
    rows.append(f"<tr><td>pool generation</td><td>{data.state.generation}</td></tr>")
    lives = ", ".join(f"{slot}: {life}" for slot, life in sorted(data.state.lives.items()))
    rows.append(f"<tr><td>lives of each process</td><td>{escape(lives) or '-'}</td></tr>")
    return section("Attempts and relay chain", f'<div class="scroll"><table>{"".join(rows)}</table></div>')


def _unseen(number: int) -> str:
    return f", {number} of them never became visible" if number else ""


def event_section(data: RunData) -> str:
    """What happened, newest last."""
    if not data.events:
        return ""
    body = "".join(
        f'<tr><td class="t">{_since(event.wall_s - data.origin_wall_s)}</td><td class="t">{escape(event.kind)}</td>'
        f"<td>{escape(event.text)}</td></tr>"
        for event in data.events
    )
    left_out = data.num_events - len(data.events)
    note = f"The newest {len(data.events)}; {left_out} older ones are in the ledger." if left_out else ""
    return section("Events", f'<div class="scroll"><table>{body}</table></div>', note)


def _since(seconds: float) -> str:
    return f"{'-' if seconds < 0 else ''}{duration(abs(seconds))}"


def spec_section(data: RunData) -> str:
    """The job as it was asked for."""
    job = data.record.requested
    values = {"apiVersion": job.api_version, "kind": job.kind}
    values |= json.loads(job.model_dump_json(by_alias=True, exclude_defaults=True))
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=110)
    return section("Job", f"<pre>{escape(text)}</pre>", f"uid {escape(data.record.uid)}")
