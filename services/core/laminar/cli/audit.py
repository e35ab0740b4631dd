"""`laminar audit`: the ledger's proof, in words and numbers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from laminar.cli.errors import BadInput
from laminar.cli.run_data import open_run
from laminar.shell.audit import AuditReport, read_audit
from laminar.shell.ledger_file import LedgerFileError


def audit(path: Path) -> AuditReport:
    """Raises BadInput if there is nothing to audit, or the ledger is another job's."""
    folder, record, _ = open_run(path)
    try:
        report = read_audit(folder.store)
    except LedgerFileError as error:
        raise BadInput(f"{path} cannot be audited: {error}.") from error
    if report.job_uid != record.uid:
        raise BadInput(f"The ledger in {folder.store} belongs to job {report.job_uid}, not to {record.uid} of {path}.")
    return report


def as_text(report: AuditReport) -> str:
    """The equation with its numbers, what was discarded and why, and every violation."""
    reasons = [(reason, number) for reason, number in sorted(report.discarded.items()) if number]
    parts = "".join(f" + {number:,} discarded ({reason})" for reason, number in reasons) or " + 0 discarded"
    right = report.consumed + sum(report.discarded.values()) + report.open
    sign = "=" if right == report.admitted else "!="
    lines = [
        f"{report.admitted:,} admitted {sign} {report.consumed:,} consumed{parts} + {report.open:,} open",
        f"{report.committed_step:,} steps committed; {report.moved_samples:,} trajectories moved to another replica, "
        f"{report.restarted_samples:,} restarted from the prompt ({report.restarted_tokens:,} tokens generated again)",
    ]
    refused = ", ".join(f"{number:,} {kind}" for kind, number in sorted(report.refused.items()) if number)
    lines.append(f"late or wrong messages refused: {refused or 'none'}")
    if report.ok:
        lines.append("OK: nothing lost, nothing used twice, one known version per trajectory.")
    else:
        lines += [f"VIOLATION: {text}" for text in report.violations]
    return "\n".join(lines)


def as_json(report: AuditReport) -> str:
    """One object."""
    return json.dumps({"ok": report.ok, "equation": report.equation, **asdict(report)})
