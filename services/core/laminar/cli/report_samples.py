"""The report's sections about single trajectories: responses side by side, and the timeline of each replica."""

from __future__ import annotations

import json
from collections.abc import Sequence
from heapq import heappop, heappush
from html import escape

from laminar.cli.report_sections import section
from laminar.cli.run_data import RunData, ShownGroup, ShownSample, ShownStep, Trajectory

MAX_RESPONSES = 4
"""Responses shown of a prompt: the best, the worst, and others in between."""
MAX_TEXT_CHARS = 6_000
"""Longer prompts and responses are cut in the report; `laminar samples` shows them whole."""
CENTISECONDS = 100


def samples_section(data: RunData) -> str:
    """First and last step beside each other."""
    if not data.shown:
        return ""
    columns = "".join(_step(step) for step in data.shown)
    note = (
        "Real prompts and responses, special tokens included. Of each step the prompts with the most different "
        f"rewards, and up to {MAX_RESPONSES} responses of each, from the best to the worst."
    )
    return section("Prompts and responses", f'<div class="two">{columns}</div>', note)


def _step(step: ShownStep) -> str:
    groups = "".join(_group(group) for group in step.groups)
    return f"<div><h3>Step {step.step}: {len(step.groups)} of {step.num_groups} prompts</h3>{groups}</div>"


def _group(group: ShownGroup) -> str:
    ranked = sorted(group.samples, key=lambda sample: (-sample.reward, sample.id))
    last = len(ranked) - 1
    places = sorted({round(i * last / (MAX_RESPONSES - 1)) for i in range(MAX_RESPONSES)})
    replies = "".join(_reply(ranked[place]) for place in places)
    return (
        f'<div class="prompt"><div class="chips"><span class="chip">answer: {escape(_cut(group.answer, 200))}</span>'
        f'<span class="chip">mean reward {group.reward_mean:.2f} of {len(group.samples)}</span></div>'
        f'<div class="text">{escape(_cut(group.prompt))}</div></div>{replies}'
    )


def _reply(sample: ShownSample) -> str:
    kind = "good" if sample.reward > 0 else "bad"
    chips = [f'<span class="chip {kind}">reward {sample.reward:g}</span>']
    facts = [f"version {sample.version}", f"{sample.length} tokens"]
    if sample.inherent is not None:
        facts.append(f"staleness {sample.inherent}")
    if sample.finish_reason == "length":
        facts.append("cut at the limit")
    if len(sample.parts) > 1:
        facts += [f"{name} {value:g}" for name, value in sorted(sample.parts.items())]
    if sample.slot:
        facts.append(sample.slot)
    chips += [f'<span class="chip">{escape(fact)}</span>' for fact in facts]
    text = "<i>Its tokens are not kept any more.</i>" if sample.response is None else escape(_cut(sample.response))
    return f'<div class="reply"><div class="chips">{"".join(chips)}</div><div class="text">{text}</div></div>'


def _cut(text: str, most: int = MAX_TEXT_CHARS) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most} more characters)"


def timeline_section(data: RunData) -> str:
    """One canvas a replica; the data travels as JSON beside it and report.js draws it."""
    slots = sorted({bar.slot for bar in data.trajectories})
    if not slots:
        return section("Timeline of trajectories", "<p>No trajectory has finished yet.</p>" + _embedded(1, [0, 0], []))
    replicas = [_lanes([bar for bar in data.trajectories if bar.slot == slot]) for slot in slots]
    versions = [bar.version for bar in data.trajectories]
    parts = [
        f'<div class="lane-head"><span class="note">version {min(versions)}<i class="ramp" style="background:'
        'linear-gradient(90deg,hsl(225 68% 54%),hsl(170 68% 54%),hsl(95 68% 54%),hsl(20 68% 54%))"></i>'
        f'{max(versions)}</span><span class="note ruler"></span><button data-act="reset">Whole run</button></div>'
    ]
    for index, (slot, replica) in enumerate(zip(slots, replicas, strict=True)):
        height = min(260, max(56, 4 * int(str(replica["lanes"]))))
        parts.append(
            f'<h3>{escape(slot)}</h3><canvas class="lanes" data-replica="{index}" style="height:{height}px" '
            f'role="img" aria-label="Trajectories of {escape(slot)} over time"></canvas>'
        )
    end = round(max(bar.end_s for bar in data.trajectories) * CENTISECONDS)
    parts.append(_embedded(end, [min(versions), max(versions)], replicas))
    left_out = data.num_trajectories - len(data.trajectories)
    thinned = f" {len(data.trajectories):,} of {data.num_trajectories:,} are drawn, evenly chosen." if left_out else ""
    note = (
        "Each bar is a trajectory from its lease to its end, coloured by the version of the weights that generated it. "
        f"Drag to look closer.{thinned}"
    )
    return section("Timeline of trajectories", "".join(parts), note)


def _embedded(end: int, versions: list[int], replicas: list[dict[str, object]]) -> str:
    """The data that report.js draws."""
    text = json.dumps({"end": end, "versions": versions, "replicas": replicas}, separators=(",", ":"))
    # `</` could end the element early; JSON allows the escaped slash.
    safe = text.replace("</", "<\\/")
    return f'<script type="application/json" id="timeline">{safe}</script>'


def _lanes(bars: Sequence[Trajectory]) -> dict[str, object]:
    """Bars that overlap in time get different lanes; each takes the lowest free one."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    num_lanes = 0
    rows: list[list[int | float | None]] = []
    for bar in sorted(bars, key=lambda bar: (bar.start_s, bar.end_s)):
        while busy and busy[0][0] <= bar.start_s:
            heappush(free, heappop(busy)[1])
        if free:
            lane = heappop(free)
        else:
            lane, num_lanes = num_lanes, num_lanes + 1
        heappush(busy, (bar.end_s, lane))
        start, end = round(bar.start_s * CENTISECONDS), round(bar.end_s * CENTISECONDS)
        reward = None if bar.reward is None else round(bar.reward, 3)
        rows.append([start, end, lane, bar.version, bar.length, reward])
    return {"lanes": num_lanes, "bars": rows}
