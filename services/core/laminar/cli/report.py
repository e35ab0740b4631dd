"""`laminar report`: RUN/report.html, one file that needs nothing else, not even a network."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

from laminar.cli import report_samples, report_sections
from laminar.cli.errors import BadInput
from laminar.cli.run_data import RunData, load_run

FILE_NAME = "report.html"


def write_report(run: Path, out: Path | None = None) -> Path:
    """Makes the report of a run, also of one that is going on or has failed. Returns its path (RUN/report.html unless
    `out` says otherwise). Raises BadInput if the folder holds no run, or the file cannot be written."""
    page = render(load_run(run))
    target = out or run / FILE_NAME
    unfinished = target.with_name(f".{target.name}.new")
    try:
        unfinished.write_text(page, encoding="utf-8")
        os.replace(unfinished, target)
    except OSError as error:
        raise BadInput(f"The report cannot be written to {target}: {error.strerror}.") from error
    return target


def render(data: RunData) -> str:
    """The whole page. Every text from the run is escaped: prompts may contain anything."""
    name = escape(data.job.metadata.name)
    here = Path(__file__)
    sections = "".join(
        [
            report_sections.cards(data),
            report_sections.reward_section(data),
            report_sections.evaluation_section(data),
            '<div class="two">',
            report_sections.staleness_section(data),
            report_sections.length_section(data),
            "</div>",
            report_samples.timeline_section(data),
            report_sections.kv_section(data),
            report_samples.samples_section(data),
            report_sections.training_section(data),
            '<div class="two">',
            report_sections.ledger_section(data),
            report_sections.history_section(data),
            "</div>",
            report_sections.event_section(data),
            report_sections.spec_section(data),
        ]
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}: Laminar report</title><style>{here.with_name('report.css').read_text()}</style></head>"
        "<body><main>"
        f'<header><h1>{name}</h1>{_badges(data)}<button data-act="theme">Light / dark</button></header>'
        f"{sections}<footer>Made by laminar report from {escape(str(data.folder))}.</footer>"
        f'</main><div id="tip"></div><script>{here.with_name("report.js").read_text()}</script></body></html>\n'
    )


def _badges(data: RunData) -> str:
    if data.result is None:
        phase, kind = "unfinished", ""
    else:
        phase, kind = data.result.phase, {"complete": "good", "failed": "bad"}.get(data.result.phase, "")
    reason = data.result.reason if data.result and data.result.phase != "complete" else ""
    schedule = data.job.spec.schedule.type.value
    parts = [f'<span class="badge {kind}">{escape(phase)}</span>', f'<span class="badge">{schedule}</span>']
    if not data.audit.ok:
        parts.append('<span class="badge bad">audit violated</span>')
    if reason:
        parts.append(f'<span class="note">{escape(reason)}</span>')
    return "".join(parts)
